"""How config classes are made and checked, on classes of the tests' own."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any, Literal

import numpy as np
import pytest

from jaxrl.config import rules
from jaxrl.config.overrides import apply_overrides
from jaxrl.config.schema import Deprecated, common, demand, internal, rare, required, section
from jaxrl.config.serialize import from_dict, to_dict
from jaxrl.errors import ConfigError


@section("part.")
class Part:
    """A section."""

    size: int = required("size", rules.at_least(1))
    rate: float = common(0.5, "rate", rules.within(0, 1))
    flag: bool = common(False, "flag")
    mode: Literal["slow", "fast"] = common("slow", "mode")
    sizes: tuple[int, ...] = rare((), "sizes", rules.increasing())
    options: dict[str, Any] = rare(dict, "options")
    limit: int | None = rare(None, "limit", rules.at_least(1))
    _probe: int = internal(0, "for tests")

    def check(self) -> None:
        """A rule between fields."""
        demand(self.size != 13 or self.flag, "part.size", self.size, "another number without flag")


def declare(**fields: Any) -> type:
    """A config class with the given fields, all int."""
    return section("x.")(type("X", (), {"__annotations__": dict.fromkeys(fields, "int"), **fields}))


def test_section_fields_in_order_of_tiers_class_is_created():
    made = declare(a=required("a"), b=common(1, "b"), c=rare(1, "c"), _d=internal(1, "d"))

    assert [(f.name, f.tier) for f in made.__section__.fields.values()] == [
        ("a", "required"),
        ("b", "common"),
        ("c", "rare"),
        ("_d", "internal"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"a": common(1, "a"), "b": required("b")},
        {"a": rare(1, "a"), "b": common(1, "b")},
        {"_a": internal(1, "a"), "b": rare(1, "b")},
    ],
)
def test_section_fields_out_of_order_class_is_refused(fields):
    with pytest.raises(TypeError, match=r"X\.b is \w+ but follows a field that is"):
        declare(**fields)


def test_section_field_without_doc_class_is_refused():
    with pytest.raises(TypeError, match=r"X\.a must be declared with a tier and a doc"):
        declare(a=common(1, " "))
    with pytest.raises(TypeError, match=r"X\.a must be declared with a tier and a doc"):
        declare(a=dataclasses.field(default=1))


def test_section_internal_field_without_underscore_class_is_refused():
    with pytest.raises(TypeError, match="start with an underscore"):
        declare(a=internal(1, "a"))
    with pytest.raises(TypeError, match="start with an underscore"):
        declare(_a=rare(1, "a"))


def test_section_type_that_flags_cannot_carry_class_is_refused():
    with pytest.raises(TypeError, match=r"X\.a has the type"):
        section("x.")(type("X", (), {"__annotations__": {"a": "list"}, "a": rare((), "a")}))


def test_section_own_post_init_class_is_refused():
    with pytest.raises(TypeError, match=r"belong in check\(\)"):
        section("x.")(type("X", (), {"__post_init__": lambda self: None}))


def test_construction_is_frozen_keyword_only_hashable_and_picklable():
    part = Part(size=3, options={"a": [1]})

    with pytest.raises(dataclasses.FrozenInstanceError):
        part.size = 4
    with pytest.raises(TypeError):
        Part(3)
    assert hash(part) == hash(Part(size=3))  # the mapping cannot take part in the hash
    assert part != Part(size=3)
    assert pickle.loads(pickle.dumps(part)) == part
    assert "size" in inspect.signature(Part).parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "part.size=0 must be at least 1"),
        ({"size": True}, "part.size=True must be an integer"),
        ({"size": 2.0}, "part.size=2.0 must be an integer"),
        ({"size": "2"}, "part.size='2' must be an integer"),
        ({"size": None}, "part.size=None must be an integer"),
        ({"size": 13}, "part.size=13 must be another number without flag"),
        ({"rate": float("nan")}, "part.rate=nan must be a finite number"),
        ({"rate": float("inf")}, "part.rate=inf must be a finite number"),
        ({"rate": True}, "part.rate=True must be a finite number"),
        ({"rate": 1.5}, "part.rate=1.5 must be between 0 and 1"),
        ({"flag": 1}, "part.flag=1 must be true or false"),
        (
            {"mode": "fats"},
            "part.mode='fats' must be one of 'slow', 'fast'; did you mean 'fast'?",
        ),
        ({"mode": ["fast"]}, "part.mode=['fast'] must be one of 'slow', 'fast'"),
        ({"sizes": 3}, "part.sizes=3 must be a tuple, each element an integer"),
        ({"sizes": (1.5,)}, "part.sizes=(1.5,) must be an integer"),
        ({"sizes": (2, 2)}, "part.sizes=(2, 2) must be increasing positive integers"),
        ({"options": [1]}, "part.options=[1] must be a mapping from names to JSON values"),
        ({"options": {1: 2}}, "part.options={1: 2} must be a mapping from names to JSON values"),
        ({"options": {"a": {1}}}, "part.options={'a': {1}} must be a mapping"),
        ({"options": {"a": float("nan")}}, "must be a mapping from names to JSON values"),
        ({"limit": 0}, "part.limit=0 must be at least 1"),
    ],
)
def test_construction_bad_value_message_names_field_value_and_rule(changes, message):
    with pytest.raises(ConfigError) as error:
        Part(**{"size": 1, **changes})

    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_construction_values_are_converted_to_the_type_of_the_field():
    part = Part(size=np.int64(3), rate=1, sizes=[1, 2], options={"a": (1, 2)}, limit=4)

    assert (part.size, part.rate, part.sizes, part.limit) == (3, 1.0, (1, 2), 4)
    assert type(part.size) is int
    assert type(part.rate) is float
    assert part.options == {"a": [1, 2]}


def test_construction_mapping_is_copied():
    options = {"a": [1]}

    part = Part(size=1, options=options)
    options["a"].append(2)

    assert part.options == {"a": [1]}


def test_construction_unknown_name_is_refused_with_suggestion():
    with pytest.raises(ConfigError, match=r"^part\.sise does not exist; did you mean part\.size"):
        Part(sise=1)
    with pytest.raises(ConfigError, match=r"^part\.zzz does not exist; the names are size, rate"):
        Part(size=1, zzz=1)


def test_construction_required_name_missing_is_refused():
    with pytest.raises(ConfigError, match=r"^part\.size is required: size"):
        Part()


def test_replace_is_validated_too():
    with pytest.raises(ConfigError, match=r"part\.rate=2\.0"):
        dataclasses.replace(Part(size=1), rate=2.0)


# A field that was renamed, one that nothing replaces, and one whose time is over.


@section(
    "new.",
    deprecated={
        "lr": Deprecated(since="0.2", to="learning_rate", migration="set new.learning_rate"),
        "trace": Deprecated(since="0.2", migration="drop it, traces are always written"),
        "gone": Deprecated(
            since="0.1", removed="0.2", migration="set new.learning_rate to gone / 1000"
        ),
    },
)
class New:
    """A section with a past."""

    learning_rate: float = common(0.1, "rate", rules.above(0))


@section("")
class Root:
    """A config with that section."""

    new: New = common(New, "a section")


def test_deprecated_name_in_code_warns_and_carries_the_value():
    with pytest.warns(
        FutureWarning,
        match=r"^new\.lr is deprecated since 0\.2 and will be removed: set new\.learning_rate$",
    ) as caught:
        new = New(lr=3)

    assert new == New(learning_rate=3.0)
    assert caught[0].filename == __file__


def test_deprecated_name_that_nothing_replaces_warns_and_is_ignored():
    with pytest.warns(FutureWarning, match="drop it"):
        assert New(trace=True) == New()


def test_deprecated_name_carried_value_is_validated_under_its_new_name():
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"new\.learning_rate=-1\.0"):
        New(lr=-1.0)


def test_deprecated_name_beside_its_new_name_is_refused():
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match=r"new\.learning_rate is also given as 'lr'"),
    ):
        New(learning_rate=1.0, lr=2.0)


def test_removed_name_in_code_raises_with_the_migration():
    with pytest.raises(
        ConfigError, match=r"^new\.gone was removed in 0\.2: set new\.learning_rate to gone / 1000$"
    ):
        New(gone=1)


def test_deprecated_name_in_a_saved_config_warns_and_carries_the_value():
    with pytest.warns(FutureWarning, match=r"new\.lr is deprecated"):
        root = from_dict(Root, {"new": {"lr": 0.5}})

    assert root == Root(new=New(learning_rate=0.5))
    assert to_dict(root) == {"new": {"learning_rate": 0.5}}


def test_removed_name_in_a_saved_config_raises_with_the_migration():
    with pytest.raises(ConfigError, match=r"new\.gone was removed in 0\.2: set"):
        from_dict(Root, {"new": {"gone": 1}})


def test_deprecated_name_as_override_warns_and_carries_the_value():
    with pytest.warns(FutureWarning, match=r"new\.lr is deprecated"):
        assert apply_overrides(Root(), {"new.lr": "2"}).new.learning_rate == 2.0
    with pytest.warns(FutureWarning, match=r"new\.trace is deprecated"):
        assert apply_overrides(Root(), {"new.trace": "true"}) == Root()


def test_deprecated_name_as_override_beside_its_new_name_is_refused():
    with (
        pytest.warns(FutureWarning),
        pytest.raises(ConfigError, match=r"given twice, as new\.learning_rate and as new\.lr"),
    ):
        apply_overrides(Root(), {"new.learning_rate": "1", "new.lr": "2"})


def test_removed_name_as_override_raises_with_the_migration():
    with pytest.raises(ConfigError, match=r"new\.gone was removed in 0\.2: set"):
        apply_overrides(Root(), {"new.gone": "1"})


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("a", Deprecated(since="0.2", migration="drop it")),
        ("b", Deprecated(since="0.2", migration="set c", to="c")),
        ("b", Deprecated(since="0.2", migration=" ", to="a")),
    ],
    ids=["still a field", "moves to nothing", "no migration"],
)
def test_section_deprecation_that_makes_no_sense_class_is_refused(name, entry):
    body = {"__annotations__": {"a": "int"}, "a": common(1, "a")}

    with pytest.raises(TypeError, match=f"X.{name}"):
        section("x.", deprecated={name: entry})(type("X", (), body))
