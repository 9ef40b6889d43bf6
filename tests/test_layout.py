"""The top-level folders and their import names, which the packaging relies on."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import longstraw_backend

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("room", ["workers", "kernels", "configs"])
def test_room_is_a_relative_link_into_the_package(room: str) -> None:
    link = ROOT / "longstraw_backend" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room
    assert link.resolve() == ROOT / room


@pytest.mark.parametrize("room", ["workers", "kernels"])
def test_room_is_no_package_of_its_own(room: str) -> None:
    # With an __init__.py, a process started in the root would import this folder in place of
    # an installed package of the same name; `kernels` is one that transformers looks for.
    assert not (ROOT / room / "__init__.py").exists()


def test_configs_is_a_package() -> None:
    # Hydra finds a primary config by pkg:// only in a regular package.
    assert (ROOT / "configs" / "__init__.py").is_file()


def test_package_is_the_one_of_this_checkout() -> None:
    assert Path(longstraw_backend.__file__).resolve() == ROOT / "longstraw_backend" / "__init__.py"
    assert longstraw_backend.__version__ == version("longstraw-backend")


def test_verl_plugin_names_a_module() -> None:
    # verl imports what the entry point names and calls nothing: an attribute would be ignored.
    (plugin,) = entry_points(group="verl.plugins", name="longstraw")
    assert plugin.value == "longstraw_backend.workers.verl.plugin"
    assert importlib.util.find_spec(plugin.module) is not None
