"""Mistakes of users who know the README and the pages of ``docs/`` only: commands as they would type them.

Why: the first message decides whether a newcomer goes on. Each mistake was written down before its message
was read: by a newcomer, a user of verl or TRL, somebody with data of their own, somebody on a cluster. Each
is refused, or told as a warning, before anything starts: with one line (or one for each of several problems)
that says what is wrong, where, and what to do, and without a traceback.

Not covered: what only a started run can find; commands that need Slurm, NeMo-Run, a GPU or the hub; other
messages of an episode's trial, which takes seconds (test_episode_trial.py); every value that a setting
refuses (test_config.py).
"""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from rpg_megatron import cli
from tests.support.commands import without_notice

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
RUN = """\
name: run
device: cpu
model: {path: MODELS/plain}
precision: {dtype: float32}
data: {path: train.jsonl, max_prompt_tokens: 32}
rollout: {prompts_per_step: 4, samples_per_prompt: 4, max_response_tokens: 32}
training: {steps: 2, minibatches: 2}
engine: {max_sequences: 16, kv_cache_gib: 0.25}
"""
SFT = """\
name: warm
device: cpu
model: {path: MODELS/plain}
precision: {dtype: float32}
sft: {data: {path: solutions.jsonl, max_tokens: 64}, batch_size: 4, epochs: 1}
"""
STUDY = "study study.yaml --dry-run"
REWARD = "train run.yaml --dry-run reward.type=my_reward:f"
RIGHT = "def f(response, answer):\n    return 1.0\n"
WRONG_LENGTH = "def f(rewards, group, lengths):\n    return rewards[:1]\n"
GSM8K = {"question": "Tom has 9 and gets 9. How many?", "answer": "9+9 = <<9+9=18>>18\n#### 18"}
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
NO_AWAIT = """\
from rpg_megatron.rollout.episode import Episode


async def play(task, generate, score):
    turn = generate(task.prompt)
    return Episode(reward=float(turn.text == task.answer))
"""
FILES = {
    "run.yaml": RUN,
    "sft.yaml": SFT,
    "train.jsonl": [{"prompt": f"Compute {i}+{i}\n", "answer": str(2 * i)} for i in range(8)],
    "heldout.jsonl": [{"prompt": f"Compute {i}+1\n", "answer": str(i + 1)} for i in range(4)],
    "solutions.jsonl": [{"prompt": f"Compute {i}+{i}\n", "response": f"Answer: {2 * i}"} for i in range(8)],
    "graded.jsonl": [{"response": "Answer: 2", "answer": "2"}],
}


class Mistake(NamedTuple):
    """A command of ``rpg-megatron``; "run OVERRIDES" stands for ``train run.yaml --dry-run OVERRIDES``."""

    command: str
    words: str
    """Regular expression of what the message says, its remedy included."""
    files: dict[str, str | list[dict[str, object]]] = {}  # noqa: RUF012  never changed
    lines: int = 1
    """Problems that are listed, one in a line."""
    warned: bool = False
    """It is a warning: what the user wants may be just this."""


M = Mistake
MISTAKES = (
    # The command line.
    M("train", "Missing argument 'CONFIG'"),
    M("train run.yml --dry-run", r"run\.yml: no such config file; did you mean run\.yaml\?"),
    M("doctor optimizer.lr=1e-5", "no such config file; give the path of a YAML file, before"),
    M("train . --dry-run", "is a directory; give a YAML file"),
    M("train run.yaml --optimizer.lr=1e-5", r"No such option.*; write optimizer\.lr=\.\.\."),
    M("train run.yaml --lr 1e-5", r"No such option: --lr; write optimizer\.lr=\.\.\.$"),
    M("train run.yaml --learning_rate=1e-5", r"--learning_rate; write optimizer\.lr=\.\.\.$"),
    M("train run.yaml --job", "Option '--job' requires an argument"),
    M("./run.yaml training.steps=3", r"command './run.yaml'; write rpg-megatron train ./run.yaml"),
    M("run optimizer.lr 1e-5", "'optimizer.lr': overrides have the form key=value"),
    M("run lora={rank: 16}", "'lora={rank:': the value is not valid YAML; put .* in quotes"),
    M("run data.answer_after=####", "YAML takes # for a comment; quote the value"),
    M("train run.yaml --resume --dry-run", "--resume: leave it out; the same command resumes"),
    M("run --node-rank 1", "--nodes and --node-rank go together"),
    M("run --from runs/run-007", "--from: runs/run-007 does not exist; give the folder"),
    M("sft run.yaml --dry-run", r"has no section sft \(.*\); use train for RL"),
    # YAML.
    M("run", r"run\.yaml:2: not valid YAML: .*; indent with spaces", {"run.yaml": "data:\n\tpath: a\n"}),
    M("run", "the key 'data' appears twice", {"run.yaml": RUN + "data: {chat: true}\n"}),
    M("run", "the key 'model' is missing; add it", {"run.yaml": ""}),
    M("run", r"bass\.yaml: no such config file \(.*extends it\)", {"run.yaml": "extends: bass.yaml\n"}),
    # Settings.
    M("config run.yaml training.stepz=1", r"'training\.steps'"),
    M("run optimiser.lr=1e-5", "unknown key 'optimiser'; did you mean 'optimizer'"),
    M("run optimizer.learning_rate=1e-5", "unknown key .*learning_rate is optimizer.lr here"),
    M("run actor_rollout_ref.rollout.n=8", "rollout.n is rollout.samples_per_prompt here"),
    M("run device=gpu", "device: must be 'cpu' or 'cuda'"),
    M("run precision.dtype=bf16", "must be 'float32' or 'bfloat16'"),
    M("run trackers=wandb", "trackers: must be a list"),
    M("run optimizer.schedule=cosine", r"a section such as \{type: cosine\}"),
    M("run lora=true", r"must be a section .* \(got true\); it has the keys rank, alpha"),
    M("run parallel=4", "must be a section .*; it has the keys tensor, pipeline"),
    M("run objective.clip=0.2", "must be a section .*; it has the keys kind, low, high"),
    M("run optimizer.lr=1e6", "optimizer.lr: must be less than or equal to 1 "),
    M(
        "run optimizer.warmup_steps=100",
        r"warmup_steps \(100\) exceeds the run's 2 steps; lower it",
        warned=True,
    ),
    M("run rollout.temperature=0", "must be greater than or equal to 0.01"),
    M("run training.minibatches=3", r"prompts_per_step \(4\) must be a multiple of .*; try 3"),
    M("run rollout.samples_per_prompt=1", "no group to compare with: .*; raise it", warned=True),
    M("run rollout.prompts_per_step=64", "8 problems, fewer than the 64 of a step", warned=True),
    M("run checkpoint.keep_best.k=3", "keep_best needs an evaluation; add one"),
    M("run reward.correct=-1 reward.wrong=1", r"correct \(-1\) is below wrong \(1\); swap"),
    M("run reward.correct=0 reward.wrong=0", "correct and wrong are both 0: .*; lower wrong"),
    # Algorithms.
    M("run objective.type=grpo", "set advantage.type to grpo and anchor.type to fixed"),
    M("run objective.type=dpo", "'dpo' is unknown; use one of rpg, grpo"),
    M("run rollout.ahead=1", "rollout.ahead needs a correction, .*set correction.type to truncate"),
    M("run rollout.top_p=0.9", "rollout.top_p needs a correction, .*set correction.type to truncate"),
    M("run 'objective={type: distil}'", "distil needs a teacher; set teacher.path or teacher.url"),
    M("run teacher.path=MODELS/plain anchor.type=fixed", "remove anchor.type"),
    M("run teacher.path=MODELS/plain", "is model.path: .*; give another", warned=True),
    M(
        "run teacher.path=MODELS/alike objective.beta=0",
        "beta is 0, so teacher trains nothing: .*; set beta, or remove it",
        warned=True,
    ),
    *(
        M(
            f"run anchor.type={kind} objective.beta=0",
            "beta is 0, so anchor trains nothing: .*; set beta, or remove it",
            warned=True,
        )
        for kind in ("fixed", "every", "kl_trigger")
    ),
    M(
        "run objective.clip.low=0.8 objective.clip.high=1.2",
        r"high 1\.2 bounds ratios by 2\.2; for 1\.2 write 0\.2",
        warned=True,
    ),
    M("run teacher.path=MODELS/other 'objective={type: distil}'", "a teacher with the same tokenizer"),
    M("run lora.r=16", "unknown key 'lora.r'; lora has the keys rank, alpha"),
    M("run 'lora={rank: 8, dropout: 0.1}'", "'lora.dropout' is gone; remove it"),
    M("run model.adapter=MODELS/adapter", "model.adapter needs lora, .*; add it"),
    M("run lora.publish=merged precision.dtype=bfloat16", "needs precision.dtype float32.*use adapters"),
    # Models and layouts.
    M("run parallel.tensor=3", r"does not divide .*\(tensor parallel sizes that fit.*: 1, 2, 4\)"),
    M("run parallel.expert=2 parallel.data=2", "the model has no experts; set it to 1"),
    M("run parallel.expert=2", r"lower it \(to 1 for a model without experts\)"),
    M("run model.path=./modle", "modle is not a directory; give the folder of a Hugging Face checkpoint"),
    M("run model.path=MODELS/gemma", r"Gemma2ForCausalLM\) is not supported; use one of: Llama"),
    M(
        "run model.path=MODELS/awq",
        r"does not read quantised weights, but for FP8 .*; give the model in bfloat16",
    ),
    M("run model.path=MODELS/adapter", "is an adapter: set model.path to its base model"),
    M("run model.path=MODELS/kimi", r"needs Python code .*once to a tokenizer\.json, as docs/models\.md"),
    M("plan run.yaml model.path=MODELS/kimi", r"needs Python code .*remove auto_map"),
    M("convert hf-to-megatron --hf MODELS/kimi --out to", r"the tokenizer of \S+kimi needs"),
    M("run model.path=MODELS/no-tokenizer", r"holds no tokenizer \(.*\); copy it there"),
    M("run model.path=MODELS/no-template data.chat=true", "no chat template; copy .*or set data.chat"),
    M("run data.chat=true data.thinking=false", "does not read enable_thinking; remove it", warned=True),
    M("run rollout.max_response_tokens=8192", "more than the model's 1024 pos.*lower one"),
    # Data.
    M("run data.path=trian.jsonl", r"data\.path: trian\.jsonl does not exist; give"),
    M("run 'data.path=[a, b]'", "must be one path; for several files .* their folder, or data.mix"),
    M(
        "run data.path=a.csv",
        r"a.csv:1: a table; convert it to JSON lines .* or Parquet",
        {"a.csv": "prompt,answer\n"},
    ),
    M("run data.path=a.json", "a.json:1: holds a list.*; give one JSON object a line", {"a.json": "[1]"}),
    M("run", "'prompt' is missing .*'question'.*set data.prompt_key", {"train.jsonl": [{"question": "1"}]}),
    M(
        "run data.prompt_key=question",
        "the answer contains ####.*set data.answer_after",
        {"train.jsonl": [GSM8K]},
    ),
    M(
        "run",
        "is a chat of 2 messages; set data.chat to true",
        {"train.jsonl": [{"prompt": CHAT, "answer": "2"}]},
    ),
    M("run", "contains no problems; it needs one JSON object per line", {"train.jsonl": ""}),
    M("run data.max_prompt_tokens=2", "all 8 prompts are longer than 2 tokens; raise"),
    M("run 'evaluation.data={path: train.jsonl, max_prompt_tokens: 32}'", "hold some out", warned=True),
    # Code of their own.
    M("run reward.type=my_reward.py:f", r"leave out \.py: my_reward:f", {"my_reward.py": RIGHT}),
    M("run reward.type=digits", r"must be one of .*, or an import path module:function"),
    M(REWARD, "no module 'my_reward'; add its folder to PYTHONPATH, or start", {"code/my_reward.py": RIGHT}),
    M("run reward.type=my_reward:g", "has no 'g'; check the name", {"my_reward.py": RIGHT}),
    M(
        REWARD,
        "f needs this setting; add it, or read it from .* row",
        {"my_reward.py": "def f(response, solution): ..."},
    ),
    M(
        REWARD,
        "no module 'nltk_x'; my_reward imports it: install it",
        {"my_reward.py": "import nltk_x\n" + RIGHT},
    ),
    M(
        REWARD,
        r"KeyError: 'meta' at .*my_reward\.py:2; correct it",
        {"my_reward.py": "def f(response, row):\n    row['meta']"},
    ),
    M(
        REWARD,
        "it returned None at .*; correct it",
        {"my_reward.py": "def f(response):\n    print(response)"},
    ),
    M(
        "run objective.type=my_loss:f",
        "needs this setting; .*as a class",
        {"my_loss.py": "def f(logp, tokens): ..."},
        2,
    ),
    M(
        "run rollout.episode=game:f",
        "no coroutine function; define it with async def",
        {"game.py": "def f(task, generate, score): ..."},
    ),
    M(
        "run advantage.type=my_advantage:f",
        r"f\(...\) is of shape \(1,\); it must be a finite number for each of 16 responses",
        {"my_advantage.py": WRONG_LENGTH},
    ),
    M("run rollout.episode=game:play", r"game\.py:6; await generate and score", {"game.py": NO_AWAIT}),
    M(
        "run rollout.episode.type=rpg_megatron.environments.tools:use_tools",
        "tool_call_parser, such as hermes",
    ),
    # Fine-tuning.
    M("sft sft.yaml training.steps=5 --dry-run", "takes 2 steps; set sft.epochs to null", warned=True),
    M("sft sft.yaml sft.data.path=train.jsonl --dry-run", "set sft.data.prompt_key and answer_key"),
    M(
        "sft sft.yaml sft.data.path=c.jsonl --dry-run",
        "is a chat; set sft.data.chat to true",
        {"c.jsonl": [{"messages": CHAT}]},
    ),
    M("sft sft.yaml objective.beta=0.1 --dry-run", "objective has no effect with sft.*; remove it"),
    M("sft sft.yaml rollout.prompts_per_step=8 --dry-run", "no effect with sft; remove it"),
    M(
        "sft sft.yaml optimizer.warmup_steps=100 --dry-run",
        r"warmup_steps \(100\) exceeds the run's 2 steps; lower it",
        warned=True,
    ),
    # Other commands.
    M("eval runs/run-001 --data heldout.jsonl", "does not exist; give the folder of a checkp"),
    M("eval MODELS/plain", "no problems to evaluate; give --suite NAME,NAME or --data FILE"),
    M("eval MODELS/plain --data heldout.jsonl rollout.max_response_tokens=9", "use --max-response-tokens"),
    M("plan run.yaml --gpu h100", "'h100' is neither .*; did you mean h100-80"),
    M("plan run.yaml --gpu h100-80 --solve rollout=240", "must be NAME=PHASE:SECONDS, such as"),
    M(STUDY, "no key config; add config: FILE", {"study.yaml": "base: run.yaml\nseeds: [1, 2]\n"}),
    M(STUDY, "seeds: must be a list, such as", {"study.yaml": "config: run.yaml\nseeds: 3\n"}),
    M(
        STUDY,
        "unknown key .*is optimizer.lr here",
        {"study.yaml": "config: run.yaml\narms: {a: {optimizer.learning_rate: 1}}\n"},
    ),
    M("init .", "already contains run.yaml.*; give another folder"),
    M("init new --task rl", "--task rl: must be one of math, custom"),
    M("init new --model ./modle", "--model: ./modle is not a directory; give a folder, or an id"),
    M("init run.yaml", "give a folder, in which run.yaml is written"),
    M("init new.yaml", "give a folder, in which run.yaml is written"),
    M("convert megatron-to-hf --megatron MODELS/plain --out out", "is a Hugging Face checkpoint already"),
    M("grade train.jsonl", "'response' is missing .*; add it, or give --reward"),
    M("grade graded.jsonl --style latex", "'latex' is not known; use one of auto"),
    M("replay runs/run-001 --step 1", "no such folder; give the folder of a run"),
    M("report run.yaml", "run.yaml: is a file; give the folder of a run"),
    M("sample run", "no such folder; give the folder of a run"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: the quickstart's, and what users have instead."""
    folder = tmp_path_factory.mktemp("models")
    for name, without, settings in (
        ("plain", "", {}),
        ("no-template", "chat_template.jinja", {}),
        ("no-tokenizer", "tokenizer.json", {}),
        ("other", "", {}),
        ("alike", "", {}),
        ("gemma", "", {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}),
        ("awq", "", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
        ("kimi", "tokenizer.json", {}),
    ):
        shutil.copytree(MODEL, folder / name, ignore=shutil.ignore_patterns(without))
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | settings))
    code = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (folder / "kimi" / "tokenizer_config.json").write_text(json.dumps(code))
    file = folder / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[5:7]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(tokenizer))
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.command for mistake in MISTAKES])
def test_a_mistake_is_told_in_one_line(mistake: Mistake, models: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {**FILES, **mistake.files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        Path(name).write_text(text.replace("MODELS", str(models)))
    command = re.sub(r"^run\b", "train run.yaml --dry-run", mistake.command).replace("MODELS", str(models))
    words = shlex.split(command)

    with pytest.raises(SystemExit) as ended:
        cli.main(words)

    shown = capsys.readouterr().err
    usage = r"Usage: |Try '|$"  # above a mistake of the command line itself
    lines = [line for line in without_notice(shown).splitlines() if not re.match(usage, line)]
    assert ended.value.code == (0 if mistake.warned else 2), shown
    assert len(lines) == mistake.lines, shown
    assert re.match("warning: " if mistake.warned else "(?i)error: ", lines[0]), shown
    assert re.search(mistake.words, lines[0]), shown
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists()
