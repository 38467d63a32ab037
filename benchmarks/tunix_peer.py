"""google-tunix on the benchmarks' shape; run by `compare_tunix.py` in an environment of its own.

`python benchmarks/tunix_peer.py [--repeats N]`: sampler (greedy; temperature 1 with
log-probabilities), GRPO train step of 32 sequences of 160 tokens, whole GRPO iterations of 4
prompts x 8 samples, and the supervised update of SmolLM2-135M, 8 rows of 128 tokens. Prints JSON.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from shapes import (
    BATCH,
    GROUP_SIZE,
    GROUPS,
    LENGTH,
    NEW_TOKENS,
    PROMPT,
    SHAPE,
    SMOLLM2,
    SMOLLM2_LENGTH,
    SMOLLM2_ROWS,
    VOCAB,
    emit,
    measure,
    now,
    summary,
)
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import peft_trainer

NEVER = 10**6  # an end of sequence that no model can sample: all rows run to their full length
ROWS = GROUPS * GROUP_SIZE
WARM_UP = 3


class NumberTokenizer:
    """Token ids written as decimal numbers."""

    def encode(self, text: str, **kwargs: object) -> list[int]:
        """Text to ids."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **kwargs: object) -> str:
        """Ids to text."""
        return " ".join(str(int(id_)) for id_ in ids)

    def bos_id(self) -> int:
        """Put in front of every prompt by the sampler."""
        return 1

    def eos_id(self) -> int:
        """Never sampled."""
        return NEVER

    def pad_id(self) -> int:
        """Fills prompts on the left."""
        return 0


def model_config(shape: dict) -> llama.ModelConfig:
    """tunix's llama3 model in the numbers of `shape`, without rematerialisation."""
    return llama.ModelConfig(
        num_layers=shape["n_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["d_model"],
        hidden_dim=shape["mlp_dim"],
        num_heads=shape["n_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["n_kv_heads"],
        rope_theta=int(shape.get("rope_theta", 10_000)),
        norm_eps=1e-5,
        weight_tying=True,
    )


def make_model(shape: dict = SHAPE) -> llama.Llama3:
    """A decoder of that shape with random weights."""
    return llama.Llama3(model_config(shape), rngs=nnx.Rngs(params=0))


def make_prompts(count: int, seed: int = 0) -> list[str]:
    """Prompts of 32 tokens, of which the sampler adds the first."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, (count, PROMPT - 1))
    return [" ".join(map(str, row)) for row in ids]


def sampler_results(repeats: int) -> dict:
    """Tokens per second of the sampler."""
    cache = CacheConfig(
        cache_size=LENGTH,
        num_layers=SHAPE["n_layers"],
        num_kv_heads=SHAPE["n_kv_heads"],
        head_dim=SHAPE["head_dim"],
    )
    sampler, prompts = Sampler(make_model(), NumberTokenizer(), cache), make_prompts(BATCH)
    shared = {
        "max_generation_steps": NEW_TOKENS,
        "max_prompt_length": PROMPT,
        "eos_tokens": [NEVER],
    }

    def sample(**options: object) -> int:
        tokens = sampler(prompts, **shared, **options).tokens
        return sum(len(row) for row in tokens)

    drawn = {"temperature": 1.0, "top_p": 1.0, "seed": 0, "return_logprobs": True}
    return {
        "greedy": measure(lambda: sample(temperature=0.0), repeats),
        "temperature_1": measure(lambda: sample(**drawn), repeats),
    }


def make_learner(max_steps: int) -> GRPOLearner:
    """GRPO without a reference model, as in ours: one update per batch."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=make_model(),
        reference=None,
        tokenizer=NumberTokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-4), eval_every_n_steps=10**9, max_steps=max_steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=NEW_TOKENS,
                max_prompt_length=PROMPT,
                temperature=1.0,
                top_p=1.0,
                kv_cache_size=LENGTH,
                eos_tokens=[NEVER],
            ),
        ),
    )

    def reward(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
        return [float(sum(map(int, text.split())) % 7) for text in completions]

    config = GRPOConfig(num_generations=GROUP_SIZE, num_iterations=1, beta=0.0, epsilon=0.2)
    return GRPOLearner(rl_cluster=cluster, reward_fns=reward, algo_config=config)


def measure_step(
    trainer: peft_trainer.PeftTrainer, batch: object, tokens: int, repeats: int
) -> dict[str, float]:
    """Tokens per second of a trainer's own jitted update on a batch of so many tokens."""
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def update() -> int:
        jax.block_until_ready(step(batch))
        return tokens

    update()  # the second call compiles again, for weights that are placed
    return measure(update, repeats)


def train_step_result(repeats: int) -> dict:
    """Tokens per second of the update alone."""
    trainer = make_learner(1).rl_cluster.actor_trainer
    rng = np.random.default_rng(0)

    def ids(length: int) -> jax.Array:
        return jnp.asarray(rng.integers(3, VOCAB, (ROWS, length)), jnp.int32)

    example = TrainExample(
        prompt_ids=ids(PROMPT),
        prompt_mask=jnp.ones((ROWS, PROMPT), bool),
        completion_ids=ids(NEW_TOKENS),
        completion_mask=jnp.ones((ROWS, NEW_TOKENS), bool),
        advantages=jnp.asarray(rng.normal(size=ROWS), jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.full((ROWS, NEW_TOKENS), -6.2, jnp.float32),
    )
    return {"train_step": measure_step(trainer, example, ROWS * LENGTH, repeats)}


def smollm2_result(repeats: int) -> dict:
    """Tokens per second of the supervised update of SmolLM2-135M, with the trainer's own loss."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=1)
    trainer = peft_trainer.PeftTrainer(make_model(SMOLLM2), optax.adamw(1e-4), config)
    shape = (SMOLLM2_ROWS, SMOLLM2_LENGTH)
    tokens = np.random.default_rng(0).integers(0, SMOLLM2["vocab_size"], shape)
    causal = jnp.tril(jnp.ones((SMOLLM2_LENGTH, SMOLLM2_LENGTH), bool))
    batch = {
        "input_tokens": jnp.asarray(tokens, jnp.int32),
        "input_mask": jnp.ones(shape, bool),
        "positions": jnp.broadcast_to(jnp.arange(SMOLLM2_LENGTH), shape),
        "attention_mask": jnp.broadcast_to(causal, (SMOLLM2_ROWS, *causal.shape)),
    }
    return {"smollm2_step": measure_step(trainer, batch, SMOLLM2_ROWS * SMOLLM2_LENGTH, repeats)}


def iteration_result(repeats: int) -> dict:
    """Generated tokens per second of whole iterations."""
    steps = WARM_UP + repeats + 1
    learner, marks = make_learner(steps), []
    whole_step = learner._run_global_step

    def timed(*args: object, **kwargs: object) -> object:
        marks.append(now())
        return whole_step(*args, **kwargs)

    learner._run_global_step = timed
    # Arrays: a list would be taken for a tree, and each prompt repeated by itself.
    learner.train({"prompts": np.array(make_prompts(GROUPS, seed))} for seed in range(steps))
    used = marks[WARM_UP:]
    return {"iteration": summary([ROWS * NEW_TOKENS] * (len(used) - 1), used)}


RESULTS = (sampler_results, train_step_result, iteration_result, smollm2_result)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[each.__name__ for each in RESULTS])
    args = parser.parse_args()
    chosen = [each for each in RESULTS if args.only in (None, each.__name__)]
    results = {name: value for each in chosen for name, value in each(args.repeats).items()}
    emit({"benchmark": "tunix_peer", "jax": jax.__version__, **results})


if __name__ == "__main__":
    main()
