"""The records that travel between the rooms of jaxrl.

Index `i` of every per-token array describes token `i`: `logprobs[i]` is
log p(token i | tokens before i) under the distribution that was really sampled from (after
temperature), and `versions[i]` is the number of the weight version whose logits produced token i.
Tokens that were not sampled (prompts, tool output) carry version `NO_VERSION` and mask 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

NO_VERSION = -1
"""Version number of tokens that no weights produced."""

FinishReason = Literal["stop", "length", "cancelled"]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightVersion:
    """Identity of one set of weights: the count of optimizer updates behind it, and its digest."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"v{self.number}:{self.digest[:12]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `tokens` int32 [P]; `index` is its position in the (endless) prompt stream.

    `id` is stable over restarts and unique within a stream; random seeds derive from it.
    `reference` is what the scorer compares with (for example `{"answer": "olleh"}`).
    """

    id: str
    index: int
    text: str
    tokens: np.ndarray
    reference: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion.

    `temperature` 0 means greedy: the recorded log-probabilities are then those of temperature 1.
    The random stream depends on `seed` and the position of the token only. `top_k` (0: all) keeps
    the most likely tokens, then `top_p` the fewest of them that hold so much of their probability
    (Holtzman et al. 2020, "The curious case of neural text degeneration"); log-probabilities are
    those of what is left, renormalised. `top_logprobs` asks for so many most likely tokens, with
    their log-probabilities, beside each sampled one.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What the sampler returns. `tokens` int32 [C], `logprobs` float32 [C], `versions` int32 [C].

    The prompt is not part of the arrays; a sampled stop token is (it is a sampled token).
    `text` is the decoded completion without the stop token, or "" when the driver has no tokenizer.
    `top_tokens` int32 [C, N] and `top_logprobs` float32 [C, N], most likely first, are there if
    `SamplingParams.top_logprobs` = N > 0 asked for them.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    text: str = ""
    top_tokens: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode: prompt and completions in one sequence of T tokens.

    `tokens` int32 [T], `loss_mask` bool [T] (True on sampled tokens), `logprobs` float32 [T]
    (0 where the mask is False), `versions` int32 [T] (`NO_VERSION` where the mask is False).
    `group_id` joins the samples of one prompt (it is the prompt's id); `sample_id` is unique.
    """

    sample_id: str
    group_id: str
    prompt_index: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float
    finish_reason: FinishReason
    text: str = ""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model produced."""
        return int(self.loss_mask.sum())


@dataclasses.dataclass(frozen=True, slots=True)
class Rejected:
    """An episode that gives nothing to train on; `reason` is a short stable word for the counts."""

    sample_id: str
    group_id: str
    reason: str
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All samples of one prompt, in the order of their sample index."""

    group_id: str
    prompt_index: int
    trajectories: tuple[Trajectory, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TrajectoryBatch:
    """Packed training batch of fixed shape: R rows of T tokens, several sequences in a row.

    tokens         int32   [R, T]  0 in padding
    positions      int32   [R, T]  position within its own sequence
    segment_ids    int32   [R, T]  1, 2, … per row; 0 in padding
    loss_mask      bool    [R, T]  True on tokens that are trained on
    loss_weights   float32 [R, T]  weight of each token in the loss; sums to 1 over the whole batch
    advantages     float32 [R, T]  0 for supervised batches
    behavior_logp  float32 [R, T]  the sampler's log-probability; 0 where the mask is False
    versions       int32   [R, T]  `NO_VERSION` where the mask is False
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    loss_weights: np.ndarray
    advantages: np.ndarray
    behavior_logp: np.ndarray
    versions: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Field name -> array, the form in which the jitted step takes the batch."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


class Sampler(Protocol):
    """What a workflow may ask of the inference side; never blocks the event loop."""

    async def sample(self, tokens: np.ndarray, params: SamplingParams) -> Completion:
        """tokens int32 [P] -> the completion. Raises `RequestError`, `DriverError`."""
