"""Logical axes map to mesh axes, and what cannot be mapped is an error that names names."""

from __future__ import annotations

import copy
import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.sharding import AXES, DEFAULT_RULES, Rules, make_mesh

RULES = Rules({"embed": "fsdp", "heads": "tensor", "batch": ("data", "fsdp"), "head_dim": None})


def test_spec_names_and_none_give_the_partition_spec():
    assert RULES.spec(("embed", "heads", "head_dim")) == P("fsdp", "tensor", None)
    assert RULES.spec((None, "embed")) == P(None, "fsdp")
    assert RULES.spec(()) == P()


def test_spec_several_mesh_axes_keep_their_order():
    assert RULES.spec(("batch", None)) == P(("data", "fsdp"), None)


def test_spec_mesh_axis_used_twice_error_names_both_dimensions():
    with pytest.raises(ValueError, match=r"'fsdp' twice.*0 \('batch'\).*1 \('embed'\)"):
        RULES.spec(("batch", "embed"))


def test_spec_same_name_twice_is_an_error():
    with pytest.raises(ValueError, match="'tensor' twice"):
        RULES.spec(("heads", "heads"))


def test_spec_unsplit_name_twice_is_allowed():
    assert RULES.spec(("head_dim", "head_dim")) == P(None, None)


def test_spec_unknown_name_error_lists_the_known():
    with pytest.raises(ValueError, match="'haeds'.*known: batch, embed, head_dim, heads"):
        RULES.spec(("embed", "haeds"))


def test_sharding_is_on_the_mesh_and_splits_in_major_to_minor_order():
    mesh = make_mesh(data=2, fsdp=4)

    sharding = RULES.sharding(mesh, ("batch",))
    placed = jax.device_put(np.arange(8), sharding)

    assert sharding == NamedSharding(mesh, P(("data", "fsdp")))
    by_device = {shard.device: int(shard.data[0]) for shard in placed.addressable_shards}
    assert [by_device[device] for device in mesh.devices.reshape(-1)] == list(range(8))


def test_sharding_mesh_of_another_project_works_with_its_names():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    assert Rules({"rows": "x", "columns": "y"}).sharding(mesh, ("rows", "columns")).spec == P(
        "x", "y"
    )


def test_sharding_mesh_without_the_axis_error_lists_its_axes():
    mesh = Mesh(np.array(jax.devices()), ("x",))

    with pytest.raises(ValueError, match=r"'embed' -> 'fsdp'.*the mesh has x"):
        RULES.sharding(mesh, ("embed",))


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"embed": 3}, "'embed' -> 3"),
        ({"embed": ("fsdp", 1)}, "'embed' -> "),
        ({"embed": ("fsdp", "fsdp")}, "twice"),
        ({7: "fsdp"}, "7 must be a string"),
    ],
)
def test_rules_malformed_rule_is_an_error(mapping, words):
    with pytest.raises(ValueError, match=words):
        Rules(mapping)


def test_shards_multiplies_the_mesh_axes_of_a_logical_axis():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)

    assert DEFAULT_RULES.shards(mesh, "batch") == 4
    assert DEFAULT_RULES.shards(mesh, "length") == 1
    assert DEFAULT_RULES.shards(None, "batch") == 1
    with pytest.raises(ValueError, match="'rows'.* has no rule"):
        DEFAULT_RULES.shards(mesh, "rows")


def test_rules_equal_mappings_are_equal_hash_alike_and_normalise():
    first = Rules({"embed": ["fsdp"], "batch": ["data", "fsdp"], "layers": ()})
    second = Rules({"layers": None, "batch": ("data", "fsdp"), "embed": "fsdp"})

    assert first == second
    assert hash(first) == hash(second)
    assert first != RULES


def test_rules_do_not_change_with_their_source_nor_by_assignment():
    source = {"embed": "fsdp"}
    rules = Rules(source)

    source["embed"] = "tensor"

    assert rules.spec(("embed",)) == P("fsdp")
    with pytest.raises(TypeError):
        rules.mapping["embed"] = "tensor"


def test_rules_replace_changes_a_copy():
    changed = RULES.replace({"embed": None, "experts": "expert"})

    assert changed.spec(("embed", "experts")) == P(None, "expert")
    assert RULES.spec(("embed",)) == P("fsdp")


def test_rules_can_be_copied_pickled_and_static_in_jit():
    assert pickle.loads(pickle.dumps(RULES)) == RULES
    assert copy.deepcopy(RULES) == RULES
    size = jax.jit(lambda rules: len(rules.mapping), static_argnums=0)

    assert size(RULES) == 4


def test_default_rules_cover_weights_and_activations():
    inputs = ("fsdp", "context", "expert", "expert_tensor")
    assert DEFAULT_RULES.spec(("vocab", "embed")) == P("tensor", inputs)
    assert DEFAULT_RULES.spec(("embed", "kv_heads", "head_dim")) == P(inputs, "tensor", None)
    assert DEFAULT_RULES.spec(("layers", "experts", "expert_embed", "expert_mlp")) == P(
        None, "expert", ("fsdp", "context"), ("tensor", "expert_tensor")
    )
    rows = ("data", "fsdp", "expert", "expert_tensor")
    assert DEFAULT_RULES.spec(("batch", "length")) == P(rows, "context")


def test_default_rules_split_every_kind_of_array_over_every_axis_that_can():
    mesh = AbstractMesh((2,) * len(AXES), AXES)
    parts = {name: DEFAULT_RULES.shards(mesh, name) for name in DEFAULT_RULES.mapping}

    # A weight that all tokens go through, an expert's, tokens of a batch, a cache.
    assert parts["embed"] * parts["mlp"] == 32  # all but data
    assert parts["experts"] * parts["expert_mlp"] * parts["expert_embed"] == 32
    assert parts["batch"] * parts["residual"] == 64
    assert parts["slots"] * parts["kv_heads"] == 64
