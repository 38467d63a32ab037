"""The collectives that are read from compiled programs are those that the program was made of."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from distributed import hlo_texts
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.distributed.hlo import Collective, bits, collectives_in
from jaxrl.errors import DistributedError
from jaxrl.sharding import make_mesh

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
QUARTERS = ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=4, tensor=2)


def _compiled(function, mesh, in_specs, out_specs, *shapes) -> str:
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*args).compile().as_text()


def test_collectives_in_shard_map_program_are_in_order_with_their_trips(mesh):
    def program(x, w):
        def layer(x, _):
            x = lax.psum(x @ w, "tensor")
            return lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]), None

        x, _ = lax.scan(layer, x, None, length=3)
        x = lax.all_gather(x, "fsdp", tiled=True)
        x = lax.psum_scatter(x, "fsdp", tiled=True)
        x = lax.all_to_all(x, "fsdp", 0, 1, tiled=True)
        return lax.pmax(x, ("fsdp", "tensor"))

    text = _compiled(program, mesh, (P("fsdp"), P()), P("fsdp"), (16, 8), (8, 8))
    found = collectives_in(text)

    assert [(c.kind, c.reduction, c.trips) for c in found] == [
        ("all-reduce", "sum", 3),
        ("collective-permute", None, 3),
        ("all-gather", None, 1),
        ("reduce-scatter", "sum", 1),
        ("all-to-all", None, 1),
        ("all-reduce", "max", 1),
    ]
    assert found[0].groups == PAIRS
    assert set(found[1].groups) == {(d, (d + 2) % 8) for d in range(8)}
    assert found[2].groups == found[3].groups == found[4].groups == QUARTERS
    assert found[5].groups == (tuple(range(8)),)
    assert found[2].shapes == ((16, 8),)
    assert found[2].dtypes == ("f32",)
    assert [c.bytes for c in found] == [4 * 8 * 4, 4 * 8 * 4, 16 * 8 * 4, 128, 128, 128]


def test_collectives_in_partitioned_program_have_normalised_groups(mesh):
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    def placed(*spec):
        return NamedSharding(mesh, P(*spec))

    step = jax.jit(
        jax.grad(loss),
        in_shardings=(placed("fsdp", "tensor"), placed("fsdp", None)),
        out_shardings=placed("fsdp", "tensor"),
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (16, 64))]
    found = collectives_in(step.lower(*args).compile().as_text())

    assert ("all-gather", QUARTERS, ((64, 32),)) in [(c.kind, c.groups, c.shapes) for c in found]
    assert {c.groups for c in found} <= {PAIRS, QUARTERS}
    assert {c.reduction for c in found if c.kind == "all-reduce"} == {"sum"}


def test_collectives_in_program_of_one_device_is_empty():
    assert collectives_in(jax.jit(jnp.sum).lower(jnp.ones(4)).compile().as_text()) == ()
    assert collectives_in("") == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[2,4]<=[4,2]T(1,0)", QUARTERS),
        ("mesh['fsdp'=4,'tensor'=2] {'tensor'}", PAIRS),
        ("mesh['fsdp'=4,'tensor'=2] {'fsdp'}", QUARTERS),
        ("mesh[fsdp=4,tensor=2] {fsdp}", QUARTERS),
        ("mesh['a'=4,'b'=1,'c'=2] {'c','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", ((7, 3), (6, 2), (5, 1), (4, 0))),
    ],
)
def test_groups_in_every_form_are_tuples_of_devices(written, expected):
    (found,) = collectives_in(hlo_texts.all_reduce(written))

    assert found.groups == expected
    assert found.reduction == "sum"


def test_groups_in_unknown_form_raises_distributed_error():
    with pytest.raises(DistributedError, match="replica_groups=<0,1>"):
        collectives_in(hlo_texts.all_reduce("<0,1>"))


def test_groups_of_replicas_over_channel_hold_all_partitions():
    text = hlo_texts.all_reduce("{{0}}").replace(", use_global_device_ids=true", "")

    (found,) = collectives_in(text)

    assert found.groups == (tuple(range(8)),)


def test_collectives_in_asynchronous_forms_count_once_with_shapes_of_results():
    found = collectives_in(hlo_texts.ASYNC)

    assert [(c.kind, c.shapes, c.dtypes) for c in found] == [
        ("all-gather", ((8, 64), (16,)), ("bf16", "f32")),
        ("collective-permute", ((8, 128),), ("f32",)),
        ("all-reduce", ((8, 128),), ("f32",)),
        ("reduce-scatter", ((1, 128),), ("f32",)),
    ]
    assert found[1].groups == ((0, 1), (1, 0))
    assert found[2].groups == found[3].groups == (tuple(range(8)),)


def test_collectives_in_fusions_of_tpu_count_once_and_scatter_what_is_cut():
    gathered, scattered = collectives_in(hlo_texts.FUSED)

    assert (gathered.kind, gathered.shapes) == ("all-gather", ((64, 128),))
    assert (scattered.kind, scattered.reduction) == ("reduce-scatter", "sum")
    assert scattered.shapes == ((8, 128),)


def test_trips_where_compiler_notes_none_are_followed_from_the_counter():
    (found,) = collectives_in(hlo_texts.loop())

    assert found.trips == 3  # 0, 2, 4


@pytest.mark.parametrize(
    "changed", [{"limit": "get-tuple-element(%p), index=2"}, {"direction": "NE"}]
)
def test_trips_of_loop_of_unknown_length_count_once(changed):
    (found,) = collectives_in(hlo_texts.loop(**changed))

    assert found.trips == 1


def test_sent_bytes_are_those_of_a_ring():
    def sent(kind: str, shape: tuple[int, ...]) -> int:
        groups = ((0, 1, 2, 3),)
        return Collective(kind, None, groups, (shape,), ("bf16",), "main").sent_bytes

    # Each of 4 devices holds a quarter of 1024 numbers of 2 bytes, or all of them.
    assert sent("all-gather", (1024,)) == 3 * 512
    assert sent("reduce-scatter", (256,)) == 3 * 512
    assert sent("all-reduce", (1024,)) == 2 * 3 * 512
    assert sent("all-to-all", (1024,)) == 3 * 512
    assert sent("collective-permute", (1024,)) == 2048


TEXTS = [
    hlo_texts.ASYNC,
    hlo_texts.FUSED,
    hlo_texts.loop(),
    hlo_texts.all_reduce("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}"),
    hlo_texts.all_reduce("mesh['a'=8] {'a':(2)2}"),
    hlo_texts.all_reduce("[2,4]<=[4,2]T(1,0)"),
]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.sampled_from(TEXTS),
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 20), st.text("(){}[]=,%01923 ", max_size=2)),
        max_size=4,
    ),
)
def test_damaged_text_is_read_or_named(text, damages):
    for place, length, instead in damages:
        start = int(place * len(text))
        text = text[:start] + instead + text[start + length :]

    try:
        found = collectives_in(text)
    except DistributedError:
        return

    assert all(one.bytes >= 0 for one in found)


def test_bits_of_dtypes():
    names = ("f32", "bf16", "pred", "s4", "f8e4m3fn", "c128")

    assert [bits(name) for name in names] == [32, 16, 8, 4, 8, 128]


def test_collectives_in_a_program_with_line_breaks_in_a_kernels_attributes_are_all_found():
    text = """HloModule m, replica_count=1, num_partitions=2

ENTRY %main (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="kernel"}
  ROOT %all = f32[8]{0} all-reduce(%k), replica_groups={{0,1}}, to_apply=%sum
}
"""  # noqa: E501

    assert [one.kind for one in collectives_in(text)] == ["all-reduce"]
