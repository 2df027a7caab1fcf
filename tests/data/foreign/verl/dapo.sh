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
