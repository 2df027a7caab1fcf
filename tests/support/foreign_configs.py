"""Configs in the form of public recipes of verl, NeMo-RL and TRL: name -> text, our settings, keys not taken.

Their settings are those of the recipes; the texts are shortened.
"""

from __future__ import annotations

from typing import Any

Config = tuple[str, dict[str, Any], list[str]]

_GSM8K_ARRAYS = r"""#!/usr/bin/env bash
set -xeuo pipefail  # GRPO, Qwen3-4B, it's one node
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
ACTOR_LR=${ACTOR_LR:-1e-6}
case "${DEVICE}" in npu) NGPUS_PER_NODE=16 ;; esac
DATA=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files=${TRAIN_FILE}
    data.val_files=${TEST_FILE}
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=1024
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH}
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=${ACTOR_LR}
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=verl_grpo \
    trainer.experiment_name=qwen3_4b \
    trainer.n_gpus_per_node=${NGPUS_PER_NODE} \
    trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "$@"
"""
_MEGATRON = r"""
train_files="['/data/gsm8k/train.parquet', '/data/math/train.parquet']"
test_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']"
python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml'\
    algorithm.adv_estimator=grpo data.train_files="$train_files" data.val_files="$test_files" \
    data.train_batch_size=1024 actor_rollout_ref.model.path=/models/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.sequence_parallel=True \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.total_training_steps=300 trainer.test_freq=-1
"""
_DAPO = r"""
project_name='DAPO'
clip_ratio_high=0.28
enable_overlong_buffer=True
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
CKPTS_DIR=${CKPTS_DIR:-"$(pwd)/ckpts"}
python3 -m verl.trainer.main_ppo \
    data.train_files="${RAY_DATA_HOME}/data/dapo-math-17k.parquet" \
    data.val_files="${RAY_DATA_HOME}/data/aime-2024.parquet" \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.gen_batch_size=${gen_prompt_bsz} data.train_batch_size=${train_prompt_bsz} \
    algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.0 algorithm.use_kl_in_reward=False \
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.filter_groups.metric=acc \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.n=32 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=${enable_overlong_buffer} \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.n_gpus_per_node=8 trainer.nnodes=16 trainer.test_freq=5 \
    trainer.default_local_dir="${CKPTS_DIR}"
"""
_RLOO = """
data: {train_files: [/data/math.parquet], train_batch_size: 1000, max_response_length: "${oc.env:LENGTH}",
  shuffle: false, seed: 3}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-3B, lora_rank: 32, lora_alpha: 64, target_modules: all-linear}
  actor:
    ppo_mini_batch_size: 300
    ppo_epochs: 2
    optim: {lr: 3e-6, betas: [0.9, 0.95]}
    kl_loss_type: kl
  rollout: {n: "${n}", top_p: 0.95}
n: 4
algorithm: {adv_estimator: rloo, use_kl_in_reward: true, kl_penalty: low_var_kl, kl_ctrl: {kl_coef: 0.002}}
custom_reward_function: {path: /code/my_rewards.py, name: score}
trainer: {nnodes: 1, n_gpus_per_node: 4, max_actor_ckpt_to_keep: null, save_freq: -1}
"""
_PPO = """
defaults:
  - ppo_trainer
  - _self_
data: {train_files: /data/gsm8k.parquet, train_batch_size: 256}
actor_rollout_ref: {model: {path: deepseek-ai/deepseek-llm-7b-chat}, actor: {ppo_mini_batch_size: 64}}
critic: {model: {path: deepseek-ai/deepseek-llm-7b-chat}, optim: {lr: 1e-5}}
algorithm: {gamma: 1.0, lam: 1.0, adv_estimator: gae}
trainer: {n_gpus_per_node: 8, v1: {trainer_mode: separate_async}}
"""
VERL: dict[str, Config] = {
    "gsm8k.sh": (
        _GSM8K_ARRAYS,
        {
            "model.path": "Qwen/Qwen3-4B",
            "data.path": "/home/me/data/gsm8k/train.parquet",
            "data.answer_key": "reward_model.ground_truth",
            "data.chat": True,
            "data.max_prompt_tokens": 1024,
            "evaluation.every": 5,
            "evaluation.temperature": 0,
            "rollout.prompts_per_step": 512,
            "rollout.samples_per_prompt": 5,
            "training.minibatches": 2,
            "training.tokens_per_microbatch": 3000,
            "objective.type": "grpo",
            "objective.beta": 0.001,
            "objective.clip.c": 3.0,
            "anchor.type": "fixed",
            "advantage.type": "grpo",
            "optimizer.lr": 1e-6,
            "optimizer.weight_decay": 0.01,
            "optimizer.warmup_steps": 0,
            "parallel.data": 8,
            "engine.colocated": True,
            "engine.tensor": 2,
            "engine.replicas": 4,
            "checkpoint.every": 20,
            "name": "qwen3_4b",
        },
        [
            "model.enable_gradient_checkpointing",
            "ref.fsdp_config.param_offload",
            "rollout.gpu_memory_utilization",
            "trainer.project_name",
            "trainer.total_epochs",
        ],
    ),
    "megatron.sh": (
        _MEGATRON,
        {
            "model.path": "/models/Qwen2-7B-Instruct",
            "objective.type": "gspo",
            "objective.low": 3e-4,
            "objective.high": 4e-4,
            "aggregation.type": "sequence_mean",
            "anchor.type": "old",
            "training.steps": 300,
            "training.minibatches": 4,
            "parallel.tensor": 2,
            "parallel.pipeline": 2,
            "parallel.sequence": True,
            "parallel.data": 4,
            "engine.tensor": 4,
            "engine.replicas": 4,
            "data.path": None,
        },
        [
            *("--config-path", "--config-name", "ref.megatron.tensor_model_parallel_size"),
            *("rollout.log_prob_micro_batch_size_per_gpu", "trainer.test_freq"),
        ],
    ),
    "dapo.sh": (
        _DAPO,
        {
            "model.path": "/home/me/verl/models/Qwen2.5-32B",
            "data.too_long": "cut",
            "data.max_prompt_tokens": 2048,
            "rollout.max_response_tokens": 20480,
            "rollout.dynamic.rounds": 10,
            "rollout.dynamic.oversample": 3.0,
            "rollout.top_k": None,
            "training.minibatches": 16,
            "training.tokens_per_microbatch": 22528,
            "objective.type": "grpo",
            "objective.beta": 0,
            "objective.clip.high": 0.28,
            "objective.clip.c": 10.0,
            "anchor.type": "old",
            "reward.overlong.buffer": 4096,
            "reward.kl": None,
            "evaluation.samples": 32,
            "evaluation.temperature": 1.0,
            "optimizer.warmup_steps": 10,
            "optimizer.weight_decay": 0.1,
            "parallel.data": 128,
        },
        ["model.override_config.attention_dropout", "trainer.default_local_dir"],
    ),
    "rloo.yaml": (
        _RLOO,
        {
            "advantage.type": "leave_one_out",
            "reward.type": "my_rewards:score",
            "checkpoint.every": None,
            "reward.kl.coefficient": 0.002,
            "reward.kl.estimator": "k3",
            "anchor.type": "fixed",
            "lora.rank": 32,
            "lora.alpha": 64,
            "lora.targets": "all-linear",
            "optimizer.lr": 3e-6,
            "training.ppo_epochs": 2,
            "rollout.samples_per_prompt": 4,
            "rollout.max_response_tokens": 512,
            "rollout.top_p": 1.0,
            "data.shuffle": False,
            "seed": 3,
            "parallel.data": 4,
        },
        [
            *(
                "actor.ppo_mini_batch_size",
                "actor.kl_loss_type",
                "data.max_response_length",
                "n",
                "rollout.top_p",
            ),
            "actor.optim.betas",
        ],
    ),
    "ppo.yaml": (
        _PPO,
        {
            "advantage.type": "grpo",
            "objective.type": "grpo",
            "training.minibatches": 4,
            "engine.colocated": False,
            "engine.replicas": 1,
            "parallel.data": 8,
        },
        [
            *("defaults", "critic.model.path", "critic.optim.lr", "algorithm.gamma", "algorithm.lam"),
            *("algorithm.adv_estimator",),
        ],
    ),
}

NEMO_MATH_1B = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_epochs: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_at_start: false
  max_val_samples: 256
  seed: 42
  use_dynamic_sampling: false
  dynamic_sampling_max_gen_batches: 10
  batch_multiplier: 1
  overlong_filtering: false
  reward_shaping: {enabled: false, overlong_buffer_length: 128, overlong_buffer_penalty: 1}
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: k3
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  sequence_level_importance_ratios: false
  token_level_loss: true
checkpointing: {enabled: true, metric_name: "val:accuracy", keep_top_k: 3, save_period: 10}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, sequence_parallel: false}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    optimizer: {lr: 5.0e-7, weight_decay: 0.1, adam_beta1: 0.9}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 4}"}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5e-6, weight_decay: 0.01, betas: [0.9, 0.999]}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 50}}
  generation:
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_k: null
    stop_strings: null
    vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6, enforce_eager: false}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  train: {dataset_name: OpenMathInstruct-2}
  validation: null
  default: {prompt_file: examples/prompts/cot.txt, env_name: math}
logger: {wandb_enabled: false, log_dir: logs}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""
_LEFT = [
    *("grpo.max_num_epochs", "policy.tokenizer.name", "policy.train_micro_batch_size"),
    *("policy.sequence_packing.train_mb_tokens", "policy.optimizer.name", "policy.scheduler"),
    *("policy.generation.vllm_cfg.gpu_memory_utilization", "data.default.prompt_file"),
    *(
        "grpo.max_val_samples",
        "grpo.val_period",
        "checkpointing.keep_top_k",
        "checkpointing.metric_name",
        "logger.log_dir",
    ),
    *("grpo.async_grpo.max_trajectory_age_steps", "grpo.val_at_start", "policy.dtensor_cfg.enabled"),
]
_MEGATRON_LEFT = [key for key in _LEFT if not key.startswith(("policy.opt", "policy.sch", "policy.dt"))]
NEMO_RECIPES: dict[str, Config] = {
    "math_1b.yaml": (
        NEMO_MATH_1B,
        {
            "model.path": "Qwen/Qwen2.5-1.5B",
            "data.hub": "nvidia/OpenMathInstruct-2",
            "data.answer_key": "expected_answer",
            "data.max_prompt_tokens": 512,
            "rollout.prompts_per_step": 32,
            "rollout.samples_per_prompt": 16,
            "rollout.max_response_tokens": 512,
            "rollout.dynamic": None,
            "training.steps": 1000000,
            "training.minibatches": 1,
            "objective.type": "grpo",
            "objective.beta": 0.01,
            "objective.clip.c": 1e9,
            "anchor.type": "fixed",
            "advantage.type": "grpo",
            "aggregation.type": "token_mean",
            "optimizer.lr": 5e-6,
            "optimizer.weight_decay": 0.01,
            "checkpoint.every": 10,
            "engine.colocated": True,
            "engine.replicas": 1,
            "reward.overlong": None,
            "seed": 42,
        },
        _LEFT,
    ),
    "llama8b-megatron.yaml": (
        """
defaults: grpo_math_1B.yaml
grpo: {num_prompts_per_step: 64, num_generations_per_prompt: 32}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  max_total_sequence_length: 4096
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    optimizer: {lr: 3.0e-7}
    scheduler: {lr_warmup_iters: 8}
  generation: {vllm_cfg: {tensor_parallel_size: 4}}
data: {validation: {data_path: /data/aime.jsonl}}
cluster: {gpus_per_node: 8, num_nodes: 2}
""",
        {
            "model.path": "meta-llama/Llama-3.1-8B-Instruct",
            "training.minibatches": 4,
            "rollout.max_response_tokens": 4096,
            "parallel.tensor": 2,
            "parallel.pipeline": 2,
            "parallel.data": 4,
            "engine.tensor": 4,
            "engine.replicas": 4,
            "optimizer.lr": 3e-7,
            "optimizer.weight_decay": 0.1,
            "optimizer.warmup_steps": 2,
            "evaluation.every": 10,
            "evaluation.sets.0.limit": 256,
            "checkpoint.keep_best.k": 3,
        },
        [
            k
            for k in _MEGATRON_LEFT
            if k not in ("grpo.val_period", "grpo.max_val_samples", "checkpointing.keep_top_k")
        ],
    ),
    "async-gspo.yaml": (
        """
defaults: grpo_math_1B.yaml
grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 2}}
loss_fn:
  use_importance_sampling_correction: true
  sequence_level_importance_ratios: true
  token_level_loss: false
  reference_policy_kl_penalty: 0.0
  ratio_clip_min: 3e-4
  ratio_clip_max: 4e-4
policy:
  generation: {colocated: {enabled: false, resources: {gpus_per_node: 4, num_nodes: null}}}
cluster: {gpus_per_node: 8}
""",
        {
            "objective.type": "gspo",
            "objective.low": 3e-4,
            "aggregation.type": "sequence_mean",
            "engine.colocated": False,
            "engine.replicas": 4,
            "parallel.data": 4,
            "rollout.ahead": 0,
            "anchor.type": "old",
        },
        [*_LEFT, "grpo.async_grpo.enabled", "loss_fn.use_importance_sampling_correction"],
    ),
    "dapo.yaml": (
        """
defaults: grpo_math_1B.yaml
grpo:
  use_dynamic_sampling: true
  batch_multiplier: 3
  use_leave_one_out_baseline: false
  overlong_filtering: true
  reward_shaping: {enabled: true, overlong_buffer_length: 256}
loss_fn: {reference_policy_kl_penalty: 0, ratio_clip_max: 0.28, ratio_clip_c: 10}
data: {train: {dataset_name: DAPOMath17K}}
checkpointing: {enabled: false}
""",
        {
            "rollout.dynamic.rounds": 10,
            "rollout.dynamic.oversample": 3,
            "training.mask_truncated": True,
            "reward.overlong.buffer": 256,
            "reward.overlong.factor": 1,
            "objective.type": "grpo",
            "objective.beta": 0,
            "objective.clip.high": 0.28,
            "objective.clip.c": 10,
            "anchor.type": "old",
            "data.preset": "dapo-math-17k",
            "checkpoint.every": None,
        },
        _LEFT,
    ),
    "new-release.yaml": (
        """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 100
  adv_estimator: {name: grpo, normalize_rewards: false, use_leave_one_out_baseline: true}
policy:
  model_name: Qwen/Qwen3-0.6B
  train_global_batch_size: 100
  generation: {temperature: 0.7, stop_strings: ["</answer>"]}
data: {train: {data_path: /data/own.jsonl, input_key: question, output_key: answer}}
loss_fn: {reference_policy_kl_penalty: 0}
env: {own: {num_workers: 1}}
""",
        {
            "advantage.type": "leave_one_out",
            "training.minibatches": 1,
            "data.path": "/data/own.jsonl",
            "data.prompt_key": "question",
            "data.answer_key": "answer",
            "rollout.temperature": 0.7,
            "rollout.stop": ("</answer>",),
            "optimizer.lr": 5e-6,
        },
        ["grpo.adv_estimator.name", "policy.train_global_batch_size", "env.own.num_workers"],
    ),
}

TRL: dict[str, Config] = {
    "open-r1-demo.yaml": (
        """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: AI-MO/NuminaMath-TIR
num_processes: 7
bf16: true
use_vllm: true
vllm_gpu_memory_utilization: 0.7
gradient_accumulation_steps: 16
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_model_id: Qwen2.5-1.5B-Open-R1-GRPO
learning_rate: 2.0e-05
lr_scheduler_type: cosine
max_prompt_length: 512
max_completion_length: 1024
max_steps: -1
num_generations: 7
num_train_epochs: 1
output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO
per_device_train_batch_size: 16
report_to: [wandb]
save_strategy: epoch
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
""",
        {
            "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
            "model.revision": "main",
            "data.hub": "AI-MO/NuminaMath-TIR",
            "data.answer_key": "solution",
            "rollout.prompts_per_step": 256,
            "rollout.samples_per_prompt": 7,
            "rollout.max_response_tokens": 1024,
            "training.minibatches": 1,
            "optimizer.lr": 2e-5,
            "optimizer.schedule.type": "cosine",
            "optimizer.weight_decay": 0.0,
            "objective.clip.c": 1e9,
            "objective.beta": 0.0,
            "anchor.type": "old",
            "parallel.data": 7,
            "engine.colocated": True,
            "engine.replicas": 7,
            "name": "Qwen2.5-1.5B-Open-R1-GRPO",
            "checkpoint.keep": 1,
            "seed": 42,
        },
        [
            *("attn_implementation", "vllm_gpu_memory_utilization", "gradient_checkpointing", "hub_model_id"),
            *("num_train_epochs", "save_strategy", "warmup_ratio"),
        ],
    ),
    "updates.yaml": (
        """
model_name_or_path: Qwen/Qwen3-4B
dataset_name: trl-lib/DeepMath-103K
dataset_test_split: test
reward_funcs: [accuracy_reward]
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 8
num_generations: 4
num_iterations: 2
max_steps: 800
save_steps: 80
eval_steps: 40
warmup_steps: 16
num_processes: 4
vllm_mode: server
loss_type: grpo
""",
        {
            "rollout.prompts_per_step": 32,
            "training.minibatches": 4,
            "training.ppo_epochs": 2,
            "training.steps": 100,
            "checkpoint.every": 10,
            "evaluation.every": 5,
            "evaluation.sets.0.split": "test",
            "optimizer.warmup_steps": 2,
            "aggregation.type": "sequence_mean",
            "reward.type": "auto",
            "engine.colocated": False,
            "engine.replicas": 1,
        },
        [],
    ),
    "dr-grpo.yaml": (
        """
model_name_or_path: Qwen/Qwen2.5-Math-1.5B
dataset_name: ./rows.parquet
reward_funcs: [my_rewards.exact]
loss_type: dr_grpo
scale_rewards: false
beta: 0.04
epsilon_high: 0.28
delta: 5.0
report_to: none
lr_scheduler_type: polynomial
""",
        {
            "objective.type": "ppo",
            "advantage.type": "rpg",
            "aggregation.type": "constant",
            "objective.clip.high": 0.28,
            "objective.clip.c": 5.0,
            "reward.type": "my_rewards:exact",
            "trackers": (),
            "optimizer.schedule.type": "constant",
        },
        ["beta", "lr_scheduler_type"],
    ),
    "gspo-lora.yaml": (
        """
model_name_or_path: Qwen/Qwen3-8B
dataset_name: openai/gsm8k
dataset_config: main
importance_sampling_level: sequence
epsilon: 3e-4
epsilon_high: 4e-4
loss_type: grpo
use_peft: true
lora_r: 32
lora_alpha: 64
lora_target_modules: [q_proj, v_proj]
lora_dropout: 0.05
chat_template_kwargs: {enable_thinking: false, other: 1}
mask_truncated_completions: true
shuffle_dataset: false
generation_batch_size: 64
""",
        {
            "objective.type": "gspo",
            "objective.high": 4e-4,
            "aggregation.type": "sequence_mean",
            "data.subset": "main",
            "lora.rank": 32,
            "lora.alpha": 64,
            "lora.targets": ("q_proj", "v_proj"),
            "data.thinking": False,
            "data.shuffle": False,
            "training.mask_truncated": True,
            "training.minibatches": 8,
            "rollout.prompts_per_step": 8,
        },
        ["lora_dropout", "chat_template_kwargs.other"],
    ),
    "reference.yaml": (
        """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.5]
beta: 0.001
use_bias_correction_kl: true
sync_ref_model: true
ref_model_sync_steps: 64
ref_model_mixup_alpha: 0.6
loss_type: sapo
sapo_temperature_neg: 1.05
scale_rewards: batch
top_k: 0
min_p: null
lora_r: 16
eval_strategy: steps
""",
        {
            "objective.beta": 0.001,
            "objective.corrected": True,
            "anchor.type": "every",
            "anchor.updates": 64,
            "objective.type": "grpo",
            "advantage.type": "grpo",
            "rollout.top_k": None,
            "lora": None,
            "reward.type": "auto",
        },
        [
            *("reward_funcs", "reward_weights", "ref_model_mixup_alpha", "loss_type", "sapo_temperature_neg"),
            *("scale_rewards",),
        ],
    ),
}
