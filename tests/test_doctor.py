"""``longstraw doctor`` on this environment, and on broken ones.

Breakage is simulated in a subprocess by a ``sitecustomize`` that hides packages or plants an error
in a module; the processes that the doctor starts inherit it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longstraw_backend import doctor, requirements
from longstraw_backend.workers.verl import doctor as verl_doctor

SITE = """
import importlib.util, os, sys
from importlib.abc import MetaPathFinder

GONE, BROKEN = (os.environ[name].split(",") for name in ("TEST_GONE", "TEST_BROKEN"))
find_spec = importlib.util.find_spec


def find(name, package=None):
    return None if name.partition(".")[0] in GONE else find_spec(name, package)


class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in BROKEN:
            raise OSError(f"planted in {name}")
        return None


importlib.util.find_spec = find
sys.meta_path.insert(0, Hide())
"""
needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)


@dataclass(frozen=True)
class Report:
    code: int
    output: str
    findings: Mapping[tuple[str, str], Mapping[str, str]]


def report_in(folder: Path, gone: str = "", broken: str = "") -> Report:
    """The doctor's report in a process where packages are hidden or a module is broken."""
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TEST_GONE": gone, "TEST_BROKEN": broken}
    environment.pop("VERL_PLATFORM", None)
    file = folder / "report.json"
    code = "import sys; from longstraw_backend.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert file.exists(), done.stderr
    report = json.loads(file.read_text())
    assert report["ok"] == (done.returncode == 0)
    found = {(f["section"], f["name"]): f for f in report["findings"]}
    return Report(done.returncode, done.stdout, found)


@needs_verl
def test_this_environment_is_ready_to_train(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    assert report.code == 0, report.output
    assert "ready to train" in report.output and "not ready" not in report.output
    names = ("entry point", "plugin", "engine", "rollout", "configuration")
    assert {report.findings["verl", name]["state"] for name in names} == {"ok"}
    assert "LongStrawEngine" in report.findings["verl", "engine"]["found"]
    assert report.findings["attention", "reference"]["state"] == "ok"
    assert any("chosen for" in f["found"] for f in report.findings.values())


def test_without_a_framework_the_core_is_still_examined(tmp_path: Path) -> None:
    report = report_in(tmp_path, gone="verl,ray,vllm")
    assert report.code == 1 and "not ready to train" in report.output
    finding = report.findings["packages", "verl"]
    assert (finding["state"], finding["found"]) == ("failed", "not installed")
    text = 'needed for the trainer: pip install "longstraw-backend[verl]"'
    assert finding["remedy"] == text and text in report.output
    assert report.findings["packages", "vllm"]["state"] == "absent"
    assert report.findings["attention", "reference"]["state"] == "ok"
    assert not any(section == "verl" for section, _ in report.findings)


def test_without_torch_there_is_a_report_too(tmp_path: Path) -> None:
    report = report_in(tmp_path, gone="torch")
    assert report.code == 1
    assert "needed for tensors" in report.findings["packages", "torch"]["remedy"]
    assert not any(section in ("device", "attention") for section, _ in report.findings)


@needs_verl
def test_a_broken_plugin_is_shown_with_its_traceback(tmp_path: Path) -> None:
    report = report_in(tmp_path, broken="longstraw_backend.workers.verl.agent_loop")
    assert report.code == 1
    plugin = report.findings["verl", "plugin"]
    assert plugin["state"] == "failed"
    assert plugin["found"] == "OSError: planted in longstraw_backend.workers.verl.agent_loop"
    assert "Traceback (most recent call last)" in report.output
    assert "planted in longstraw_backend.workers.verl.agent_loop" in report.output
    assert ("verl", "engine") not in report.findings


def test_importing_the_doctor_imports_nothing_that_may_be_missing() -> None:
    code = (
        "import sys, longstraw_backend.doctor, longstraw_backend.workers.verl.doctor\n"
        "assert not {'torch', 'transformers', 'verl', 'rich', 'packaging'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def package(name: str) -> requirements.Package:
    return next(p for p in requirements.PACKAGES if p.name == name)


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("verl", "0.9.1", "ok"),
        ("verl", "0.8.0", "failed"),
        ("verl", "0.10.0", "failed"),
        ("vllm", "0.26.0", "warning"),
        ("torch", "2.7.0a0+git1234", "failed"),
        ("torch", "2.13.0+cpu", "ok"),
        ("ray", "unknown", "ok"),
    ],
)
def test_versions_are_held_against_the_ranges(
    name: str, version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed_version", lambda _: version)
    finding = doctor._package(package(name))
    assert (finding.state, finding.found) == (state, version)
    assert (f'pip install "{name}{finding.wanted}"' in finding.remedy) == (state != "ok")


def test_ranges_are_those_of_the_metadata() -> None:
    assert str(requirements.wanted_range("verl")) == "<0.10,>=0.9.1"
    assert "2.6.0" not in requirements.wanted_range("torch")
    assert requirements.wanted_range("transferqueue") == requirements.wanted_range("TransferQueue")
    assert {"verl", "TransferQueue", "pyzmq"} <= set(requirements.extra_names("verl"))
    assert not {"torch", "pytest"} & set(requirements.extra_names("verl"))


@needs_verl
def test_ranges_of_verl_count_too() -> None:
    assert "5.6.0" not in requirements.wanted_range("transformers")
    assert "3.13.0" not in requirements.python_range()[1]


def test_a_kernel_that_does_not_work_fails_where_it_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, impl: str, **kwargs: Any) -> None:
        raise RuntimeError(f"no kernel image for {impl}\nand more")

    monkeypatch.setattr("longstraw_backend.kernels.segment_attention.segment_attention", broken)
    states = {finding.name: finding for finding in doctor._attention("cpu")}
    assert states["cpu"].state == "failed" and "chosen for float32" in states["cpu"].found
    assert states["cpu"].found.startswith("RuntimeError: no kernel image for cpu, chosen")
    assert states["reference"].state == "warning"
    assert states["cudnn"].state == "absent"


def test_a_kernel_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "longstraw_backend.kernels.segment_attention.segment_attention"
    monkeypatch.setattr(path, lambda q, *_, impl, **__: q * (2 if impl == "cpu" else 1))
    assert doctor._try_attention("cpu", "cpu").startswith("differs from the reference by")


@pytest.mark.parametrize(
    ("policy", "loaded"), [("auto", True), ("x, longstraw", True), ("", False)]
)
def test_a_policy_that_keeps_verl_from_the_plugin_is_told(
    policy: str, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(verl_doctor.POLICY, policy)
    finding = verl_doctor.attempt("entry point", verl_doctor.check_entry_point, "")
    assert finding["state"] == ("ok" if loaded else "failed")
    assert loaded or "keeps verl from loading it; unset it" in finding["found"]


def test_a_framework_that_ends_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    code = "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(doctor, "_verl_command", lambda report: [sys.executable, "-c", code])
    *_, finding = doctor._verl("cpu")
    assert (finding.state, finding.detail) == ("failed", "out of luck\n")


def test_brackets_and_long_texts_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    remedy = 'needed for x: pip install "longstraw-backend[verl]" ' + "and so on " * 20
    doctor._print([doctor.Finding("packages", "x", "failed", "[red]", remedy=remedy)], ok=False)
    output = capsys.readouterr().out
    assert remedy.strip() in output and "[red]" in output


def test_a_report_without_rich_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.run(argparse.Namespace(json=None)) == 1
    assert 'rich is missing; run: pip install "longstraw-backend"' in capsys.readouterr().err
