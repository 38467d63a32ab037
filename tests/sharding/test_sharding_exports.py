"""The room's front door: lazy, complete, and honest about names it does not have."""

from __future__ import annotations

import pytest

import jaxrl.sharding as sharding


def test_every_public_name_can_be_imported_and_is_listed():
    for name in sharding.__all__:
        assert getattr(sharding, name) is not None
        assert name in dir(sharding)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="make_mush"):
        sharding.make_mush
