"""The sections of the configuration. Each field says what it does and which values it accepts."""

from __future__ import annotations

from typing import Any, Literal

from jaxrl.config import rules
from jaxrl.config.rope_scaling import check_rope_scaling
from jaxrl.config.schema import common, demand, rare, required, section

Dtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adafactor"]
MAX_SEED = 2**31 - 1
MAX_LAYERS = 1000
"""Layers are built one by one; a damaged config.json must not keep a process busy for ever."""

NO_MEANING = ("weights", "max_length", "remat", "dtype")
"""Fields of the model that may change while its weights stay what they are."""

LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
"""Weights of a layer that can have an adapter."""


@section("model.")
class ModelConfig:
    """Shape of the decoder (pre-norm, grouped-query attention, RoPE, SwiGLU)."""

    n_layers: int = common(4, "decoder layers", rules.within(1, MAX_LAYERS))
    d_model: int = common(256, "width of the residual stream", rules.at_least(1))
    n_heads: int = common(4, "query heads; a multiple of n_kv_heads", rules.at_least(1))
    n_kv_heads: int = common(2, "key and value heads", rules.at_least(1))
    head_dim: int = common(64, "width of one head; even, for RoPE", rules.at_least(2))
    mlp_dim: int = common(1024, "width of the MLP", rules.at_least(1))
    vocab_size: int = common(
        0, "number of token ids", rules.at_least(0, "0: the size of data.tokenizer")
    )
    max_length: int = common(
        512, "longest sequence in tokens, prompt and completion together", rules.at_least(2)
    )
    weights: str = common(
        "", "folder or GGUF file of published weights to start from; empty: random ones"
    )
    lora_rank: int = common(
        0, "rank of the adapters that are trained", rules.at_least(0, "0: all weights are trained")
    )
    lora_alpha: float = common(
        16.0, "adapters are multiplied by lora_alpha / lora_rank", rules.above(0)
    )
    lora_targets: tuple[str, ...] = common(
        LORA_TARGETS, "weights that get an adapter", rules.among(LORA_TARGETS)
    )
    rope_theta: float = rare(10000.0, "base of the rotary frequencies", rules.above(0))
    rope_scaling: dict[str, Any] = rare(
        dict,
        'scaling of rotary positions as in config.json: rope_type "linear", "llama3" or "yarn" and '
        "its numbers; empty: none",
    )
    local_rope_theta: float = rare(
        0.0,
        "base of the rotary frequencies in layers with a window, which rope_scaling then leaves "
        "alone",
        rules.at_least(0, "0: as in the others"),
    )
    norm_eps: float = rare(1e-6, "added to the variance in RMSNorm", rules.above(0))
    qk_norm: bool = rare(False, "normalise queries and keys per head")
    norm_offset: bool = rare(False, "store the scale of a norm as what is added to 1")
    post_norms: bool = rare(False, "normalise what attention and MLP give, too")
    qkv_bias: bool = rare(False, "add a bias to queries, keys and values")
    query_scale: float = rare(
        0.0, "scores are multiplied by query_scale^-0.5", rules.at_least(0, "0: by head_dim^-0.5")
    )
    attention_softcap: float = rare(
        0.0, "attention scores are kept between -cap and cap", rules.at_least(0, "0: no cap")
    )
    logits_softcap: float = rare(
        0.0, "logits are kept between -cap and cap", rules.at_least(0, "0: no cap")
    )
    sliding_window: int = rare(
        0,
        "tokens that a layer with a window sees",
        # Positions are counted on the device in 32 bits.
        rules.within(0, 2**31 - 1, "0: no layer has one"),
    )
    global_every: int = rare(
        0,
        "of so many layers the last one sees the whole sequence, the others have the window",
        rules.at_least(0, "0: all layers have it"),
    )
    activation: Literal["silu", "gelu"] = rare("silu", "activation of the MLP (gelu: with tanh)")
    n_experts: int = rare(
        0, "experts of each layer, mlp_dim wide each", rules.at_least(0, "0: one MLP instead")
    )
    experts_per_token: int = rare(2, "experts that a token goes to", rules.at_least(1))
    normalize_experts: bool = rare(True, "let the shares of a token's experts sum to 1")
    scale_embedding: bool = rare(False, "multiply token embeddings by the root of d_model")
    tie_embeddings: bool = rare(True, "use the token embedding as output projection too")
    scan_layers: bool = rare(
        False, "scan over the layers: compiles faster, runs slower where there are few layers"
    )
    remat: Literal["none", "dots", "full"] = rare(
        "none",
        "what the backward pass recomputes to save memory: nothing; all of a layer but its "
        "products with weights; or every layer (on CPUs it saves memory only with scan_layers)",
    )
    dtype: Dtype = rare("float32", "type of the computation")
    param_dtype: Dtype = rare("float32", "type in which weights are kept and updated")

    def check(self) -> None:
        """Heads divide among key and value heads; a head splits into pairs."""
        demand(
            self.n_heads % self.n_kv_heads == 0,
            "model.n_heads",
            self.n_heads,
            f"a multiple of model.n_kv_heads={self.n_kv_heads}",
        )
        demand(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even")
        check_rope_scaling(self.rope_scaling, self.rope_theta)
        experts, chosen = self.n_experts, self.experts_per_token
        rule = f"at most model.n_experts={experts}"
        demand(not experts or chosen <= experts, "model.experts_per_token", chosen, rule)
        if self.lora_rank:
            self._check_lora()

    def windowed(self, layer: int) -> bool:
        """Whether the layer of that index sees `sliding_window` tokens only."""
        every = self.global_every
        return self.sliding_window > 0 and not (every and (layer + 1) % every == 0)

    def _check_lora(self) -> None:
        targets = self.lora_targets
        demand(bool(targets), "model.lora_targets", targets, "non-empty, because of lora_rank")
        experts = {"gate", "up", "down"}.intersection(targets) if self.n_experts else ()
        rule = f"without {', '.join(sorted(experts))}: experts have no adapters"
        demand(not experts, "model.lora_targets", targets, rule)


@section("data.")
class DataConfig:
    """Where prompts and their answers come from."""

    source: Literal["reasoning_gym", "jsonl"] = required(
        "kind of source: reasoning_gym generates the data set named by task, jsonl reads path"
    )
    task: str = common("", "name of a reasoning-gym data set; needed by source reasoning_gym")
    task_options: dict[str, Any] = common(dict, "options of that data set, as its own config")
    path: str = common("", "JSON-lines file with question and answer; needed by source jsonl")
    train_size: int = common(1000, "number of training prompts", rules.at_least(1))
    eval_size: int = common(200, "number of held-out evaluation prompts", rules.at_least(1))
    prompt_template: str = common(
        "{question}",
        "text of the prompt around the question; may name metadata of the examples too",
        rules.template(),
    )
    answer_format: Literal["auto", "plain", "gsm8k"] = common(
        "auto",
        "form of the answers of source jsonl. gsm8k: a solution, then the answer behind the last "
        "####, in every line; training on answers then learns the whole text. plain: the answer "
        "alone. auto: what follows #### where there is one, else the whole answer",
    )
    tokenizer: str = common(
        "chars",
        'tokenizer: "chars", "bytes", or path of a tokenizer.json or GGUF file',
        rules.non_empty(),
    )
    max_prompt_tokens: int = common(
        128, "longest prompt in tokens; longer ones are an error", rules.at_least(1)
    )
    chat: bool = common(
        False, "ask each prompt as the user's message, in the chat template of the tokenizer"
    )
    system_prompt: str = common("", "what the system says before; needs chat; empty: nothing")
    chat_variables: dict[str, Any] = rare(
        dict, "variables of the chat template, such as enable_thinking or date_string; needs chat"
    )
    train_seed: int = rare(0, "seed of the training prompts", rules.within(0, MAX_SEED))
    eval_seed: int = rare(1, "seed of the evaluation prompts", rules.within(0, MAX_SEED))

    def check(self) -> None:
        """Each source has its own field; those of the other one must stay empty."""
        gym = self.source == "reasoning_gym"
        needed, other = ("task", "path") if gym else ("path", "task")
        why = f"data.source={self.source!r}"
        value, unused = getattr(self, needed), getattr(self, other)
        demand(bool(value), f"data.{needed}", value, f"non-empty, because of {why}")
        demand(not unused, f"data.{other}", unused, f"empty, because of {why}")
        options = self.task_options
        demand(gym or not options, "data.task_options", options, f"empty, because of {why}")
        for name in ("system_prompt", "chat_variables"):
            value = getattr(self, name)
            demand(self.chat or not value, f"data.{name}", value, "empty, unless data.chat is true")
        form = self.answer_format
        demand(form == "auto" or not gym, "data.answer_format", form, f"'auto', because of {why}")


@section("sft.")
class SFTConfig:
    """Cold start: supervised training on the reference answers before RL."""

    steps: int = common(0, "optimizer updates", rules.steps("0: no cold start"))
    batch_size: int = common(32, "sequences per update", rules.at_least(1))
    learning_rate: float = common(3e-4, "peak learning rate of AdamW", rules.above(0))
    micro_batches: int = rare(1, "parts of a batch, as train.micro_batches", rules.at_least(1))
    warmup_steps: int = rare(0, "updates of linear warm-up; at most steps", rules.at_least(0))
    schedule: Schedule = rare("cosine", "course of the learning rate after the warm-up")
    grad_clip: float = rare(1.0, "largest gradient norm", rules.at_least(0, "0: no clipping"))
    weight_decay: float = rare(0.0, "decoupled weight decay", rules.at_least(0))
    optimizer: OptimizerName = rare("adamw", "as train.optimizer")
    moment_dtype: Dtype = rare("float32", "as train.moment_dtype")
    careless: float = rare(
        0.0,
        "fraction of the longer answers whose last character is left out, to study imperfect "
        "demonstrations",
        rules.within(0, 1),
    )
    careless_above: int = rare(
        0, "answers of at most so many characters are never cut", rules.at_least(0)
    )

    def check(self) -> None:
        """The warm-up fits into the updates."""
        if self.steps:
            _check_warmup("sft", self.warmup_steps, self.steps)
        _check_moments("sft", self)


@section("train.")
class TrainConfig:
    """The RL updates. One batch gives exactly one optimizer update and one weight version."""

    steps: int = common(100, "RL updates", rules.steps("0: no RL"))
    batch_size: int = common(
        64, "trajectories per update; a multiple of rollout.group_size", rules.at_least(1)
    )
    learning_rate: float = common(1e-5, "peak learning rate of AdamW", rules.above(0))
    warmup_steps: int = common(0, "updates of linear warm-up; at most steps", rules.at_least(0))
    schedule: Schedule = common("constant", "course of the learning rate after the warm-up")
    micro_batches: int = common(
        1, "parts in which a batch goes through the model, to save memory", rules.at_least(1)
    )
    grad_clip: float = common(1.0, "largest gradient norm", rules.at_least(0, "0: no clipping"))
    weight_decay: float = rare(0.0, "decoupled weight decay", rules.at_least(0))
    b1: float = rare(0.9, "decay of AdamW's first moment", rules.below_one())
    b2: float = rare(0.95, "decay of AdamW's second moment", rules.below_one())
    eps: float = rare(1e-8, "added to the denominator of AdamW", rules.above(0))
    optimizer: OptimizerName = rare(
        "adamw",
        "adamw, or adafactor, which keeps of the second moment only means over rows and columns "
        "and no first one: next to no memory",
    )
    moment_dtype: Dtype = rare(
        "float32",
        "type in which AdamW's moments are kept; bfloat16 halves their memory and needs train.b2 "
        "of at most 0.99",
    )
    row_length: int = rare(
        0, "tokens in a row of the packed batch", rules.at_least(0, "0: model.max_length")
    )
    logprob_chunk: int = rare(
        256,
        "tokens of the whole batch whose logits exist at once when log-probabilities are taken; "
        "on each device at least 256 of them, or this number if it is less",
        rules.at_least(1),
    )

    def check(self) -> None:
        """The warm-up fits into the updates."""
        if self.steps:
            _check_warmup("train", self.warmup_steps, self.steps)
        _check_moments("train", self)


def _check_warmup(name: str, warmup_steps: int, steps: int) -> None:
    rule = f"at most {name}.steps={steps}"
    demand(warmup_steps <= steps, f"{name}.warmup_steps", warmup_steps, rule)


def _check_moments(name: str, config: SFTConfig | TrainConfig) -> None:
    if config.moment_dtype == "float32":
        return
    field = f"{name}.moment_dtype"
    rule = f"'float32', because of {name}.optimizer='adafactor': it keeps next to nothing"
    demand(config.optimizer == "adamw", field, config.moment_dtype, rule)
    # A change of less than half a unit in the last of 8 bits is rounded away: 0.996 would be the
    # end, where a second moment never falls.
    b2 = getattr(config, "b2", 0.95)
    demand(b2 <= 0.99, f"{name}.b2", b2, f"at most 0.99, because of {field}='bfloat16'")


@section("algorithm.")
class AlgorithmConfig:
    """The objective: GRPO (arXiv:2402.03300), decoupled for stale data (arXiv:2505.24298)."""

    loss: Literal["grpo"] = common("grpo", "the objective")
    clip_low: float = common(0.2, "the ratio is clipped below at 1 - clip_low", rules.within(0, 1))
    clip_high: float = common(0.2, "the ratio is clipped above at 1 + clip_high", rules.at_least(0))
    normalize_std: bool = common(True, "divide advantages by the standard deviation of their group")
    normalisation: Literal["token", "sequence"] = common(
        "token", "what weighs the same in the loss: every token, or every sequence"
    )
    kl_coef: float = common(
        0.0, "weight of the KL penalty towards the weights RL began with", rules.at_least(0)
    )
    ref_offload: bool = rare(
        False,
        "keep the weights that the KL penalty refers to in the host's memory; they visit the "
        "devices for each batch",
    )
    decoupled: bool = rare(
        True, "separate the policy that sampled from the one the ratio is clipped against"
    )
    behavior_weight_cap: float = rare(
        5.0, "cap of the weight exp(prox_logp - behavior_logp)", rules.at_least(0, "0: no cap")
    )


@section("rollout.")
class RolloutConfig:
    """How trajectories are sampled, and how far sampling may run ahead of training."""

    max_staleness: int = common(
        1, "most updates between the weights of a token and its use", rules.at_least(0)
    )
    group_size: int = common(8, "samples per prompt", rules.at_least(1))
    max_new_tokens: int = common(128, "longest completion in tokens", rules.at_least(1))
    temperature: float = common(1.0, "sampling temperature", rules.above(0))
    slots: int = common(32, "sequences decoded at once", rules.at_least(1))
    in_flight: Literal["finish", "continue", "recompute"] = common(
        "continue",
        "what a sequence does when new weights arrive: finish under the old ones, continue over "
        "its cache, or recompute the cache",
    )
    steps_per_dispatch: int = rare(8, "tokens decoded per call of the device", rules.at_least(1))
    prefill_buckets: tuple[int, ...] = rare(
        (), "padded prompt lengths, each compiled once; () for powers of two", rules.increasing()
    )
    max_concurrent: int = rare(
        0, "episodes running at once", rules.at_least(0, "0: enough to fill the slots")
    )
    episode_timeout_s: float = rare(120.0, "longest episode in seconds", rules.seconds())
    max_retries: int = rare(2, "new attempts after a failed episode", rules.at_least(0))
    wait_timeout_s: float = rare(
        300.0, "longest wait of the trainer for a batch in seconds", rules.seconds()
    )
    samplers: tuple[str, ...] = rare(
        (),
        "addresses of the `jaxrl serve --run=OUTPUT_DIR --follow` that sample for the run; () "
        "samples in the trainer's own process",
        rules.http_addresses(),
    )
    samplers_token_file: str = rare(
        "", "file with the token that they ask for; empty: that in JAXRL_SERVE_TOKEN, or none"
    )


@section("rewards.")
class RewardConfig:
    """How completions are scored."""

    scorer: str = common("exact", "the reward function", rules.scorer_name())
    workers: int = common(1, "processes that score", rules.at_least(1))
    timeout_s: float = common(5.0, "longest time for one score in seconds", rules.seconds())
    on_error: Literal["raise", "reject"] = rare(
        "raise",
        "when a scorer fails, the run stops or the sample goes; after a time-out it always goes",
    )


@section("eval.")
class EvalConfig:
    """Evaluation on held-out prompts, on one pinned weight version."""

    every: int = common(
        0, "updates between evaluations", rules.at_least(0, "0: before and after training only")
    )
    size: int = common(200, "prompts; at most data.eval_size", rules.at_least(1))
    temperature: float = rare(0.0, "sampling temperature", rules.at_least(0, "0: greedy"))
    max_new_tokens: int = rare(
        0, "longest completion in tokens", rules.at_least(0, "0: rollout.max_new_tokens")
    )


@section("checkpoint.")
class CheckpointConfig:
    """What is saved, when, and whether a run goes on from it."""

    every: int = common(
        0, "updates between full checkpoints", rules.at_least(0, "0: at the end only")
    )
    resume: Literal["auto", "never", "must"] = common(
        "auto", "go on from output_dir: if a checkpoint is there, never, or fail without one"
    )
    keep: int = rare(2, "full checkpoints that are kept", rules.at_least(1))
    publish_every: int = rare(
        0,
        "updates between weight versions written to disk",
        rules.at_least(0, "0: the first and the last only"),
    )


@section("observe.")
class ObserveConfig:
    """What a run shows and records."""

    progress: bool = common(True, "show progress on the terminal")
    tensorboard: bool = common(True, "write TensorBoard events")
    plots: bool = common(True, "draw plots at the end of the run (needs the extra `plots`)")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = common(
        "INFO", "least severity that is logged"
    )
    compilation_cache: str = rare(
        "", 'folder of compiled programs; "" for one in the user\'s cache folder, "off" for none'
    )
