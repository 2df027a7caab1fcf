"""Each sentence of docs/security.md, and of that in evidence/, has a test, or a reason why it has none.

Why: a page on security that is wrong is worse than none, and nobody notices when the code changes. ``TABLE``
has a test, or ``limit:`` with a reason, and below it parts of the sentences that it supports. Proved: each
sentence, and each statement in a cell of a table, has such a part; each part is on the page once; each test
exists. Not covered: whether a test proves the whole sentence; that is for the reader of both.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TABLE = """
limit: a summary, or the way to what the rest of the page says
  What rpg_megatron trusts, what
  In short: models
  how foreign input is confined
  The test of each sentence here
  The process gives up its rights so
  Private files of a run have mode
  Before it reads, it gives up its rights
  Which processes have such ports
  They **can**
limit: a word of caution or advice, which no code can make true
  reward.type: module:function` is imported
  yes, they are your code
  what an environment says through it
  which are no sandbox
  anyone who can write there can change
  whose faults a hostile file may use
  A hostile one can
  Do not use `--from` with a run that somebody
  `eval` of a run, or of a checkpoint in it
  Use a container or a cgroup
  see which programs run
  Who opens enough of them ends the process
  Who connects in place of a rank
  use a network namespace or a container
  read the run's folder, if your umask
  anyone who can open it can lock it
  `umask 077` before the command
  This does not help in a shared folder without
  Use nodes of your own
limit: what other software does, and does not
  those in the log files of engines stay
  without these limits, by each command
  vLLM and transformers read a model's folder themselves
  Their loaders have no limits
  run without limits in each process that needs one
  open a checkpoint again after it was checked
  may use many times their size in memory
  without authentication and without a limit
  no setting of vLLM avoids it
  Two libraries still send pickles over gloo
  Megatron when it builds an optimizer
  torch's TCP store has no password
  Other traffic is not encrypted
  none on TCP
  with pickled objects | | TCP from node to node
  none: whoever can change its store
integration/test_engine_over_nodes.py::test_a_worker_killed_on_each_node
limit: needs GPUs, another kernel or another machine
  from Linux 6.7
  The filter exists for x86_64 and aarch64
  also with GPUs
  TCP at an address of the node that NCCL chooses
  keeps it there | TCP or InfiniBand
  a number from the ranks' store
  the same on a GPU
unit/test_security_docs.py::test_packages_are_pinned
  yes, pinned in `requirements/`
  of the two, the pins have
unit/test_config.py::test_unknown_key_names_the_nearest_valid_one
  unknown keys are errors
integration/test_reward_pool.py::test_a_function_of_the_users_own_scores
  yes: `reward.type: module:function`
unit/test_engine_command.py::test_command_line
  `engine.arguments` are passed to vLLM
  weights are read from safetensors only
unit/test_peft.py::test_a_broken_adapter_is_one_message
  weights are read from safetensors only, no pickles
  unix socket in the work folder | the same on the first node, TCP
unit/test_hostile_inputs.py::test_a_fifo_and_a_device_are_refused_at_once
  regular files, at most 100
  | regular files; lines
unit/test_hostile_inputs.py::test_files_that_extend_each_other_many_times_are_refused
  at most 100 and 250 KB
unit/test_hostile_inputs.py::test_settings_that_no_reader_can_take
  no aliases that expand beyond that
unit/test_gateway.py::test_a_client_that_leaves_or_outlives_its_episode
  HTTP on the loopback address
  the same, on the first node
  a key for each response
  it ends with the episode
unit/test_gateway.py::test_connections_without_a_key_end
  Connections that show none end after 60 s, or before others are refused
unit/test_episode_pool.py::test_only_the_faulty_episode_fails
  killed at its limits of time and memory
unit/test_episodes.py::test_a_faulty_episode_is_counted
  its tokens are those of the model's vocabulary
integration/test_sandbox.py::test_what_a_program_cannot_do
  no: they have no network, and of
  other processes can neither be seen
integration/test_sandbox.py::test_a_program_that_goes_on_is_ended
  limits of time, memory, processes, files and output
integration/test_sandbox.py::test_what_a_program_cannot_do
  they get no open file but their standard streams;
integration/test_sandbox.py::test_nothing_is_left_of_a_call
  what they have started is killed after each call
integration/test_sandbox_attacks.py::test_nothing_of_a_call_reaches_the_next
  only files in `/work` reach the next one
integration/test_sandbox_attacks.py::test_memory_of_every_kind_is_refused_or_counted
  a filter refuses system calls that would take memory which cannot be counted
integration/test_sandbox_attacks.py::test_calls_that_the_filter_refuses
  keys, namespaces and tracing
limit: Apptainer's own work
  as far as Apptainer prevents it
integration/test_apptainer_sandbox.py::test_what_a_program_cannot_do
  a container with a network and processes of its own
integration/test_apptainer_sandbox.py::test_a_program_that_goes_on_is_ended
  the same limits, but the sizes of files
integration/test_reward_pool.py::test_every_input_gets_an_outcome
  they run in workers with a time and memory limit
integration/test_reward_pool_hostile.py::test_sixty_hostile_answers_each_get_a_verdict_in_time
  graded as text, by rules and
integration/test_custom_rewards.py::test_of_a_judges_answer_4_mib_are_read
  | 4 MiB;
integration/test_custom_rewards.py::test_a_judge_that_fails_costs_scores_and_counts_them
  a number is read from them
  time limit; no redirects
  which is read from the environment only
integration/test_custom_rewards.py::test_a_judge_is_asked_again_after_waits_that_grow
  no redirects, so that its key
unit/test_megatron_folder.py::test_a_manifest_returns_its_facts_and_finds_all_damage
unit/test_resume_rules.py::test_a_damaged_checkpoint_is_passed_over
  before a resume: checkpoints by SHA-256
unit/test_resume_rules.py::test_a_state_of_another_form_is_one_message
  the form of `state.json`
unit/test_run_owner.py::test_code_of_another_users_run_is_not_run
  its settings must belong to you or root
unit/test_secret_values.py::test_a_secret_is_refused_by_its_key_and_not_shown
  a secret among them is
  by its key (`api_key`
  in a URL (`http://user
  Name an
unit/test_secret_values.py::test_what_is_no_secret_passes
  `$NAME`, names of variables
unit/test_secret_values.py::test_settings_of_a_child_are_not_in_its_command_line
  Settings reach the processes of a run
unit/test_resume_rules.py::test_a_run_of_another_user_is_not_resumed
  the folder must belong to you
  Runs of other users are
unit/test_checkpoint_path.py::test_a_run_a_step_and_its_model_are_the_same_checkpoint
  `convert` and `eval` copy configuration and tokenizer
unit/test_checkpoint_path.py::test_what_is_evaluated
  They use no other key of a checkpoint that was copied
unit/test_checkpoint_path.py::test_no_link_of_a_step_leads_out_of_it
unit/test_resume_rules.py::test_nothing_is_read_through_links_out_of_a_run
  no link may lead outside the folder you give
  Below a folder that others may have made, a link
unit/test_report.py::test_a_page_has_nothing_of_files_to_which_a_run_only_links
unit/test_checkpoint_path.py::test_no_link_of_a_run_leads_out_of_it
  --from` or `report` | no | no link may lead outside
unit/test_report.py::test_a_tokenizer_that_ends_its_process_is_a_note
  which decodes prompts in the process
unit/test_report.py::test_the_settings_of_others_choose_no_tokenizer
  The tokenizer in the `model.path` of
unit/test_report.py::test_values_of_another_form_do_not_reach_the_arithmetic
  what has another form than metrics
unit/test_report.py::test_hostile_text_stays_text
  escaped in reports
unit/test_files.py::test_a_copy_has_no_more_readers_than_its_source
  copies have no more readers than their source
  The copy of a file that others may not read
unit/test_files.py::test_what_lies_in_the_folder_is_read
  Hard links are files like others
unit/test_files.py::test_a_link_planted_later_is_not_copied
  What is checked is the open file
unit/test_files.py::test_json_files_have_a_limit
  at most 100 MB
unit/test_files.py::test_a_planted_part_is_not_written_through
  files are written under names that cannot be guessed
unit/test_files.py::test_a_file_of_ours_is_no_planted_link_or_fifo
  locks, logs and results are not opened
unit/test_files.py::test_what_belongs_to_others_is_not_removed
  Only what belongs to you is removed
unit/test_foreign_rollouts.py::test_only_runs_of_ones_own_are_decoded_without_that_process
  a run given to `replay`, `audit`
  Rollouts are decoded
unit/test_hostile_inputs.py::test_a_tokenizer_with_code_of_its_own_asks_nothing
  No code of the folder is run
unit/test_model_shape.py::test_sizes_that_no_model_has_are_refused
  Sizes in `config.json`
unit/test_hostile_inputs.py::test_headers_beyond_the_format_are_refused
  headers of weight files have bounds
  tensors must not overlap
unit/test_hostile_inputs.py::test_a_chat_template_is_ended
  Chat templates are rendered
unit/test_plain_loading.py::test_what_a_checkpoint_names_is_not_run
  they are never loaded, but interpreted
  What a pickle in a checkpoint names
  Where a tensor should be, the checkpoint
  Elsewhere it becomes
unit/test_plain_loading.py::test_values_of_a_pickle_are_inert
  by code that can only make plain values
unit/test_plain_loading.py::test_a_tensor_that_claims_what_it_is_not_is_one_message
unit/test_plain_loading.py::test_only_the_span_of_a_tensor_is_read_from_its_storage
  within what their storage holds
unit/test_plain_loading.py::test_a_checkpoints_small_files_are_no_links_out_of_it
unit/test_plain_loading.py::test_an_index_names_only_files_of_its_folder
unit/test_megatron_folder.py::test_a_checkpoint_is_no_link_out_of_the_given_folder
  Files outside the folder are refused
unit/test_plain_loading.py::test_an_index_may_name_what_it_does_not_need
  In the index, what is not needed
unit/test_plain_loading.py::test_our_own_index_needs_no_pickle
  Our own checkpoints need no pickle for their index
  is the same as JSON, with the SHA-256
  If another tool has changed that
unit/test_plain_loading.py::test_pickles_for_other_libraries_are_left_out
  FP8 states of Transformer Engine are pickles
unit/test_plain_loading.py::test_a_run_trusts_pickles_only_in_its_own_folder
  They are kept when a run resumes from its own folder
unit/test_hostile_inputs.py::test_a_line_without_end_is_one_message
  lines of at most 256 MiB
unit/test_hostile_inputs.py::test_a_flipped_bit_of_an_arrow_file_ends_no_process
  Arrow and Parquet files are read
unit/test_hostile_inputs.py::test_a_small_file_that_stands_for_gigabytes_is_refused
  a compressed file may hold 100 times
unit/test_stored_prompts.py::test_what_others_could_have_written_is_not_used
  its folder must belong to you, with mode 0700
unit/test_stored_prompts.py::test_another_users_file_or_a_link_is_not_used
  links are not followed; a checksum
unit/test_stored_prompts.py::test_a_damaged_file_is_made_again
  a checksum finds damage, and
  what is not accepted is made again
unit/test_terminal.py::test_no_command_prints_what_others_wrote_as_it_is
  Control characters in names
unit/test_foreign_input.py::test_values_of_another_type_are_refused
unit/test_foreign_input.py::test_no_more_values_than_asked_for
unit/test_foreign_input.py::test_every_end_is_one_message
  parses it and returns plain values as msgpack
  It has limits on memory and time
unit/test_foreign_input.py::test_only_listed_system_calls_are_let_through
  a seccomp filter lets only listed
unit/test_foreign_input.py::test_planted_code_can_reach_nothing
  so that it reaches neither files nor a network
  The process cannot open a file
unit/test_foreign_input.py::test_each_means_alone_protects_files
  Landlock without any rule denies
  The filter alone denies all of this
  Landlock alone leaves
unit/test_foreign_input.py::test_a_reader_has_limits_for_as_long_as_it_lives
  writes no files, also no core file
unit/test_foreign_input.py::test_a_reader_gets_no_secrets
  an environment without secrets
unit/test_foreign_input.py::test_a_reader_ends_with_the_process_that_started_it
unit/test_foreign_input.py::test_a_reader_whose_parent_has_already_ended_reads_nothing
  It ends when its parent ends
unit/test_doctor_probes.py::test_the_process_for_foreign_input_is_tried
  tries the process on the machine
  Where the kernel has neither
integration/test_bad_input.py::test_an_engine_that_is_too_slow_is_ended
  is stopped after `engine.start_timeout`
unit/test_hostile_inputs.py::test_weights_may_be_links
  The weights of a model are read through symbolic links
unit/test_hostile_inputs.py::test_only_files_of_the_model_are_copied_into_exports
  a link that leaves the folder you name is an error
unit/test_hostile_inputs.py::test_the_cache_of_the_hub_is_all_links_and_is_accepted
  except into the blobs of the Hugging Face cache
integration/test_bridge_vllm.py::test_every_route_asks_for_the_token
  the run's token as a bearer token, on every route
  unix sockets in the work folder, or in `$TMPDIR`
  file in the bridge folder
  none: mode 0700
integration/test_slurm.py::test_two_nodes
  TCP at the first node's address, where leaders fetch
  TCP at the cluster addresses
  it is in no log or file of a run
  never from a command line
integration/test_sampler_workers.py::test_the_batch_does_not_depend_on_workers
  sampler and its workers | unix sockets
  logs of engines; files of the sampler
unit/test_messages.py::test_only_who_knows_the_token_gets_in
  CURVE keys that follow from the token; encrypted
unit/test_rank_env.py::test_ranks_of_one_node_meet_in_a_private_file
  trainer ranks' store | file in the work folder
  TCP on loopback
unit/test_rank_env.py::test_ranks_of_several_nodes_meet_at_one_address_only
  TCP at the cluster address of rank 0 | several nodes: none
unit/test_rank_env.py::test_the_workers_of_an_engine_on_several_nodes_meet_at_one_address_only
  TCP at the cluster address of the first of an engine's nodes
unit/test_rank_env.py::test_the_measurement_of_the_network_listens_at_one_address_only
  TCP at the cluster address of the first node, for seconds
unit/test_rank_env.py::test_every_rank_has_the_token_from_its_environment_alone
  Processes have it from their environment
unit/test_rank_env.py::test_the_links_store_is_a_private_folder_on_one_node
  folder, mode 0700, in the bridge folder
distributed/test_process_group_transport.py::test_workers_get_their_slices_again_and_again
  folder, mode 0700, in the bridge folder
  TCP at the address of rank 0
distributed/test_weight_fan_out.py::test_a_wait_for_a_request_blocks_in_the_store
  requests for weights are signed; otherwise none
unit/test_progress.py::test_an_event_socket_that_is_taken_is_one_message
  launchers | unix socket in the work folder
unit/test_nodes.py::test_nodes_meet_though_strangers_knock
  TCP at the first node's address for the others
  encrypted with keys that follow from the token
integration/test_slurm.py::test_a_warned_run_is_requeued_and_goes_on_to_its_end
  The token is new for each start
distributed/test_control_group.py::test_a_rank_alone_listens_on_no_port
  a trainer rank alone | none
distributed/test_control_group.py::test_ranks_exchange_values_and_read_no_pickles
  each process listens at ports ([below]
  connect to gloo's ports on loopback
  one, for all of its process groups
  What trainer ranks tell each other is msgpack
distributed/test_lazy_gloo.py::test_collectives_of_lazy_groups
  one of more than 32 trainer ranks
  one more for each group of more than 32 ranks
  they take connections during the whole run
distributed/test_weight_fan_out.py::test_links_are_made_at_the_same_time
  one for each link between a rank and an engine worker
unit/test_shared_memory_transport.py::test_folder_must_be_private_and_memory_must_suffice
integration/test_rollout_engine.py::test_every_route_asks_for_the_token_and_errors_name_the_engine
  On a single node they **cannot**
  one for all of vLLM's groups
unit/test_scratch_dirs.py::test_folders_of_dead_runs_go_and_those_of_living_ones_stay
  need a shorter path | 0700; removed at the end
  `/dev/shm/rpg-*` | 0700; removed in the same way
unit/test_scratch_dirs.py::test_the_work_folder_is_in_tmpdir_if_socket_paths_fit
  or `/tmp/rpg-*` if sockets need a shorter path
unit/test_hostile_inputs.py::test_the_folder_of_a_conversion_is_private
  `.NAME.incomplete` | 0700
unit/test_resume_rules.py::test_only_the_owner_can_lock_a_run
  0600: anyone who can open it
integration/test_engine_process.py::test_starts_answers_and_stops
  files of the sampler: `engines.jsonl` | 0600
unit/test_resume_rules.py::test_the_rest_of_a_run_follows_the_umask_also_behind_a_link
  exports | your umask
  Links that you give are followed: `runs`
unit/test_resume_rules.py::test_a_run_can_be_started_from_through_a_link
  a run's folder and a model's may be reached
unit/test_resume_rules.py::test_checkpoints_of_a_run_may_be_on_another_disk
  `checkpoints/` of your own run lie on another disk
"""

PAGE = "\n".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("security.md", "evidence/security.md")
)
NO_STATEMENTS = {"no", "none", "the same", ""}


def blocks(page: str) -> list[str]:
    """Paragraphs, list items and rows of tables, each in one line; neither headings nor heads of tables."""
    page = re.sub(r"^\|.*\n\|[-|]+\n", "", page, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=- |\|)", page)
    return [" ".join(part.split()) for part in parts if part.strip() and not part.startswith("#")]


def statements(block: str) -> list[tuple[int, int]]:
    """Where the statements of a block begin and end: sentences; in tables, also what semicolons part."""
    if not block.startswith("|"):
        ends = [m.end() for m in re.finditer(r"[.:](?=\s+[A-Z`*])|$", block)]
    else:  # the first cell says what the row is about
        first = block.index("|", 1)
        ends = [first, *(m.end() for m in re.finditer(r"\||;|\.(?=\s[A-Z])", block) if m.end() > first)]
    spans = [
        (a, b)
        for a, b in zip([0, *ends], ends, strict=False)
        if block[a:b].strip(" |;.") not in NO_STATEMENTS
    ]
    return spans[1:] if block.startswith("|") else spans


def entries(table: str) -> list[tuple[str, list[str]]]:
    """Tests, or a limit, and the parts of the page below each; a test without parts shares the next's."""
    rows: list[tuple[str, list[str]]] = []
    for line in table.strip().splitlines():
        if line.startswith("  "):
            rows[-1][1].append(line.strip())
        else:
            rows.append((line, []))
    return rows


def missing_from(page: str, table: str) -> list[str]:
    """Statements of a page that no part of the table covers, and parts that are not there just once."""
    lines = blocks(page)
    parts = [part for _, texts in entries(table) for part in texts]
    problems = [part for part in parts if sum(line.count(part) for line in lines) != 1]
    for line in lines:
        covered = [(at, at + len(part)) for part in parts if (at := line.find(part)) >= 0]
        problems += [line[a:b] for a, b in statements(line) if not any(x < b and a < y for x, y in covered)]
    return problems


def test_each_statement_has_a_test_or_a_reason() -> None:
    assert missing_from(PAGE, TABLE) == []


def test_each_test_exists() -> None:
    tests = [name for name, _ in entries(TABLE) if not name.startswith("limit: ")]
    functions = {}
    for file in {name.partition("::")[0] for name in tests}:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [name for name in tests if name.partition("::")[2] not in functions[name.partition("::")[0]]] == []


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("\nNothing can happen. It is safe.\n", ["Nothing can happen.", "It is safe."]),
        ("| x | no | it is closed; none |\n", ["it is closed;"]),
        ("- It is open: others see it\n", ["- It is open: others see it"]),
        ("\n## A heading\n\n| head | of a table |\n|---|---|\n| first | no |\n", []),
    ],
)
def test_a_sentence_without_a_test_is_found(added: str, expected: list[str]) -> None:
    assert [text.strip(" |") for text in missing_from(PAGE + added, TABLE)] == expected
    assert missing_from(PAGE.replace("encrypted |", "|"), TABLE) != []


def test_packages_are_pinned() -> None:
    names, used = set(), set()
    for file in (ROOT / "requirements").glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith(("#", "    --hash=")):
                match = re.match(r"([\w.-]+)(\[[\w,-]+\])?(==| @ )\S+", line)
                assert match, f"{file.name}: {line}"
                names.add(match[1].lower())
                if file.name != "dev.txt":
                    used.add(match[1].lower())
    assert len(names) > 100
    assert "kernels" not in names
    assert "peft" not in used
