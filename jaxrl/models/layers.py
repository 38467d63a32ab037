"""What the layers of every family are made of: declared weights, the norm, the MLP.

Weights are declared, not made: each is a `jax.ShapeDtypeStruct` with its logical axes and the mean
and spread of its initial values as metadata. `model.build_model` splits them off once, and real
arrays are merged in at each call. Modules keep no state besides: the KV cache is an argument.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.chunked import Prior
from jaxrl.models.parallel import Arrays, LinearMap, columns, rows
from jaxrl.models.spread import Spread

if TYPE_CHECKING:
    from jaxrl.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class Sight:
    """Where the queries of a layer stand and what they see.

    cos, sin float32 [B, T, H/2]; mask bool [B or 1, T, S], None where attention is told
    `Context.segment_ids` instead; `window` > 0 promises that all but the last so many tokens are
    hidden.
    """

    cos: jax.Array
    sin: jax.Array
    mask: jax.Array | None
    window: int = 0


@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer needs to know about the tokens of this call.

    `whole` holds for layers that see the whole sequence, `windowed` for the others (None: there are
    none). `spread`: how activations lie on a mesh (None: no mesh). `causal`: S = T, the masks hide
    later entries. Without a cache on a mesh, `attention` names what computes it ("plain", "ring",
    "splash") from `segment_ids` [B, T]. With a cache: `slots` [B, T] are the entries that the
    tokens are written to, and queries see the first `attend_length` entries; or `prior` says which
    entries stand before these tokens, and nothing is written.
    """

    whole: Sight
    windowed: Sight | None
    spread: Spread | None = None
    slots: jax.Array | None = None
    attend_length: int = 0
    prior: Prior | None = None
    causal: bool = False
    attention: str = "plain"
    segment_ids: jax.Array | None = None

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """x with its sharding pinned, a logical axis per dimension; as it is without a mesh."""
        return x if self.spread is None else self.spread.pin(x, axes)

    @property
    def streamed(self) -> bool:
        """Whether products with split weights are those of `parallel`: in training, where a batch
        is worth gathering weights for. Elsewhere the compiler chooses what it moves."""
        return not self.alone and self.slots is None and self.prior is None

    @property
    def alone(self) -> bool:
        """Whether one device holds everything."""
        return self.spread is None or self.spread.mesh.size == 1

    def sight(self, windowed: bool | jax.Array) -> Sight:
        """That of a layer; `windowed` may be traced, where layers are scanned."""
        if self.windowed is None or windowed is False:
            return self.whole
        if windowed is True:
            return self.windowed
        near, far = self.windowed, self.whole

        def pick(name: str) -> jax.Array | None:
            pair = getattr(near, name), getattr(far, name)
            return None if pair[0] is None else jnp.where(windowed, *pair)

        return Sight(pick("cos"), pick("sin"), pick("mask"))


@dataclasses.dataclass(frozen=True)
class Declare:
    """Declares the weights of one module; `layers` > 0 puts an axis for scanned layers in front."""

    dtype: str
    layers: int = 0

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, mean: float = 0.0, std: float
    ) -> nnx.Param:
        """A weight without a value; initial values are normal with `mean` and `std`."""
        if self.layers:
            shape, axes = (self.layers, *shape), ("layers", *axes)
        abstract = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        # Not eager: logical names are no mesh axes, and the mesh is not known here.
        return nnx.Param(abstract, out_sharding=axes, eager_sharding=False, mean=mean, std=std)


class RMSNorm(nnx.Module):
    """Zhang & Sennrich 2019, eq. 4, over the last axis; computed in float32.

    With `config.norm_offset` the stored scale is what is added to 1.
    """

    def __init__(self, width: int, config: ModelConfig, declare: Declare):
        self.eps = config.norm_eps
        self.offset = 1.0 if config.norm_offset else 0.0
        # Not split: gathering a few numbers for each use would cost more than it saves.
        self.scale = declare((width,), (None,), mean=1.0 - self.offset, std=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D] in the dtype of x."""
        wide = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (wide * rms * scale).astype(x.dtype)


class Adapter(nnx.Module):
    """Low-rank change of a product: alpha/rank * B(A(x)). Hu et al. 2021, "LoRA", section 4.1.

    A [r, *inputs] begins random with the variance of PyTorch's linear layers, B [*outputs, r] at 0,
    so that training starts from the model as it is.
    """

    def __init__(
        self,
        outputs: dict[str, int],
        inputs: dict[str, int],
        config: ModelConfig,
        declare: Declare,
    ):
        rank = config.lora_rank
        std = (3 * math.prod(inputs.values())) ** -0.5
        self.a = declare((rank, *inputs.values()), (None, *inputs), std=std)
        self.b = declare((*outputs.values(), rank), (*outputs, None), std=0.0)


class Projections(nnx.Module):
    """Base of modules whose weights are linear maps, each with an adapter if the config wants."""

    def declare_map(
        self,
        name: str,
        outputs: dict[str, int],
        inputs: dict[str, int],
        config: ModelConfig,
        declare: Declare,
        *,
        std: float | None = None,
    ) -> None:
        """Set the weight `name` [*outputs, *inputs] (logical axis -> size), and its adapter."""
        std = math.prod(inputs.values()) ** -0.5 if std is None else std
        shape, axes = (*outputs.values(), *inputs.values()), (*outputs, *inputs)
        setattr(self, name, declare(shape, axes, std=std))
        factor = 0.0
        if config.lora_rank and name in config.lora_targets:
            setattr(self, f"{name}_lora", Adapter(outputs, inputs, config, declare))
            factor = config.lora_alpha / config.lora_rank
        setattr(self, f"{name}_map", LinearMap(tuple(outputs), tuple(inputs), factor))

    def fan_out(self, names: tuple[str, ...], x: jax.Array, context: Context) -> list[jax.Array]:
        """x [B, T, D] of the residual stream -> for each map [B, T, *outputs]."""
        maps = [(getattr(self, f"{name}_map"), self._arrays(name)) for name in names]
        if context.streamed:
            return list(columns(x, maps, context.spread))
        shapes = (own.weight.shape[: len(layout.outputs)] for layout, own in maps)
        products = (layout(x, own) for layout, own in maps)
        return [y.reshape(*x.shape[:2], *shape) for y, shape in zip(products, shapes, strict=True)]

    def fan_in(self, name: str, x: jax.Array, context: Context) -> jax.Array:
        """x [B, T, *inputs] -> [B, T, D] of the residual stream."""
        layout, arrays = getattr(self, f"{name}_map"), self._arrays(name)
        if context.streamed:
            return rows(x, layout, arrays, context.spread)
        return layout(x.reshape(*x.shape[:2], -1), arrays)

    def _arrays(self, name: str) -> Arrays:
        adapter = getattr(self, f"{name}_lora", None)
        factors = () if adapter is None else (adapter.a[...], adapter.b[...])
        return Arrays(getattr(self, name)[...], *factors)


class MLP(Projections):
    """SwiGLU or GeGLU: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6."""

    def __init__(self, config: ModelConfig, declare: Declare):
        embed, mlp = {"embed": config.d_model}, {"mlp": config.mlp_dim}
        self.declare_map("gate", mlp, embed, config, declare)
        self.declare_map("up", mlp, embed, config, declare)
        # 2 * n_layers outputs add up in the residual stream: each gets its share of the variance.
        std = (config.mlp_dim * 2 * config.n_layers) ** -0.5
        self.declare_map("down", embed, mlp, config, declare, std=std)
        self.activation = config.activation

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """x [B, T, D] -> [B, T, D]."""
        gate, up = self.fan_out(("gate", "up"), x, context)
        inner = context.constrain(ACTIVATIONS[self.activation](gate) * up, _MLP)
        return self.fan_in("down", inner, context)


_MLP = ("batch", "length", "mlp")
