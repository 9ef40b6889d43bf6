#!/usr/bin/env bash
# DAPO of GLM-5.2 on prompts of up to two million tokens, four nodes of eight GPUs in one Ray cluster.
#   MODEL=... TRAIN=train.parquet VAL=val.parquet REWARD=reward.py examples/glm_5_2/run.sh [OVERRIDES]
set -euo pipefail

"${PYTHON:-python3}" -m verl.trainer.main_ppo \
    model_engine=longstraw \
    +longstraw="${OVERLAY:-glm_5_2_2m_yarn}" \
    actor_rollout_ref.model.path="${MODEL:?path or name of GLM-5.2}" \
    data.train_files="${TRAIN:?parquet file of training prompts}" \
    data.val_files="${VAL:?parquet file of held-out prompts}" \
    reward.custom_reward_function.path="${REWARD:?Python file with compute_score}" \
    reward.custom_reward_function.name=compute_score \
    trainer.project_name=longstraw \
    trainer.experiment_name=glm_5_2_2m \
    trainer.total_training_steps=100 \
    trainer.save_freq=10 \
    "$@"
