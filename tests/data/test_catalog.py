"""The catalog of formats is complete, and formats can be sent to other processes."""

import importlib
import pickle
import pkgutil

from data.catalog import FORMATS
from data.config import FormatName
from data.program import PREFIX
from data.text.files import Format


def test_the_catalog_lists_each_format_that_a_module_declares():
    package = importlib.import_module(f"{PREFIX}data")
    modules = pkgutil.walk_packages(package.__path__, f"{PREFIX}data.")
    declared = {
        value
        for module in modules
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, Format)
    }
    assert declared == {*FORMATS}


def test_names_are_unique_and_those_of_the_key_are_among_them():
    names = [format.name for format in FORMATS]
    assert len(names) == len({*names})
    assert {*FormatName} <= {*names}


def test_no_suffix_promises_two_formats():
    for format in FORMATS:
        for suffix in format.suffixes:
            named = [f for f in FORMATS if f.is_named(f"a{suffix}.gz")]
            assert named == [format]


def test_a_format_is_equal_in_another_process():
    assert pickle.loads(pickle.dumps(FORMATS)) == FORMATS
