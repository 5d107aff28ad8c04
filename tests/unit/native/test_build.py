"""The kernels are compiled once per machine; without a compiler XLA computes, which is said once."""

import warnings
from pathlib import Path

import pytest

from jaxspec.errors import ConfigError
from jaxspec.native import build
from jaxspec.native.build import Library, compiler, library
from jaxspec.nn import policy as policy_module
from jaxspec.nn.policy import kernels_for, policy_for
from pallas_kernels.select import SlowKernelWarning

compile_again = library.__wrapped__


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxspec" / "native"


def test_a_compiler_that_fails_is_the_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "/bin/false")
    made = compile_again("plain")
    assert made.handle is None
    assert "/bin/false failed" in made.reason
    assert not list(empty_cache.glob("**/*.so"))


def test_the_reason_is_the_error_and_no_note_after_it(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    script = empty_cache.parent.parent / "cc"
    script.write_text("#!/bin/sh\necho 'call.h:35: error: unknown type' >&2\necho 'cc1: note: an option' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert compile_again("plain").reason == f"{script} failed: call.h:35: error: unknown type"


def test_a_compiler_that_is_not_there_is_the_reason(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "/nowhere/cc" in compile_again("plain").reason


def test_without_any_compiler_the_reason_says_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    assert compiler() is None
    assert "pip install ziglang" in compile_again("plain").reason


def test_the_wheel_of_a_compiler_is_the_last_resort(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    assert (compiler() or [])[1:] == ["-m", "ziglang", "cc"]


def test_what_was_compiled_is_taken_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    if compile_again("plain").handle is None:
        pytest.skip("no compiler here")
    assert len(list(empty_cache.glob("*.so"))) == 1
    monkeypatch.setenv("CC", "/bin/false")
    assert compile_again("plain").handle is not None


def test_a_library_that_cannot_be_loaded_is_the_reason(empty_cache: Path):
    empty_cache.mkdir(parents=True)
    build._path("plain", build.SOURCE).write_bytes(b"no library")
    assert "cannot be loaded" in compile_again("plain").reason


def test_the_fallback_is_said_once_and_an_explicit_wish_is_refused(monkeypatch: pytest.MonkeyPatch):
    none = Library(None, "plain", "no C compiler: for this test")
    monkeypatch.setattr(policy_module, "native_kernels", lambda: none)
    with pytest.warns(SlowKernelWarning, match="no C compiler: for this test"):
        assert kernels_for("cpu")[0] == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy_for("bfloat16", "cpu").compute.kernels == "xla"
    with pytest.raises(ConfigError, match=r"no C compiler.*'xla'"):
        policy_for("bfloat16", "cpu", "native")


def test_native_kernels_are_for_cpus():
    with pytest.raises(ConfigError, match="this is gpu"):
        policy_for("bfloat16", "gpu", "native")
    assert policy_for("bfloat16", "gpu").compute.kernels == "triton"
