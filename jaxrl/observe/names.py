"""The metric names that the progress display and the plots look for."""

from __future__ import annotations

REWARD = "reward/mean"
ACCURACY = "eval/accuracy"
STALENESS = "rollout/staleness_mean"
LENGTH = "rollout/completion_length"
LOGP_GAP = "train/logp_gap"
ROLLOUT_SPEED = "rollout/tokens_per_second"
TRAIN_SPEED = "train/tokens_per_second"

LABELS = {
    REWARD: "reward",
    ACCURACY: "accuracy",
    STALENESS: "staleness",
    LENGTH: "completion length",
    LOGP_GAP: "train/rollout log-probability gap",
    ROLLOUT_SPEED: "rollout tokens/s",
    TRAIN_SPEED: "train tokens/s",
}
"""Metric name -> what people read."""

UNITS = {
    REWARD: "mean of the batch",
    ACCURACY: "fraction of the evaluation set",
    STALENESS: "versions, mean over tokens",
    LENGTH: "tokens, mean of the batch",
    LOGP_GAP: "mean |difference| per token",
}
"""Metric name -> the label of its axis."""
