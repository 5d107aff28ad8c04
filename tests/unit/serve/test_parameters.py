"""Sampling parameters: numbers of any library, one error per wrong value, names refused with the reason."""

import copy
import pickle
from dataclasses import replace
from decimal import Decimal
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.serve.parameters import ALLOWED, REFUSED, RequestOutputKind
from jaxspec.serve.request import SamplingParams

SAME: list[tuple[str, Any, Any]] = [
    ("max_tokens", np.int64(4), 4),
    ("max_tokens", jnp.int32(4), 4),
    ("n", np.uint8(2), 2),
    ("top_k", np.int32(-1), -1),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", 1, 1.0),
    ("temperature", np.array(0.25), 0.25),
    ("top_p", Decimal("0.5"), 0.5),
    ("seed", -1, None),
    ("seed", np.int64(7), 7),
    ("ignore_eos", np.bool_(True), True),
    ("stop", ("a", "b"), ["a", "b"]),
    ("stop", "a", "a"),
    ("stop_token_ids", np.array([3, 4]), [3, 4]),
    ("stop_token_ids", (np.int64(3),), [3]),
    ("logit_bias", {"5": 1, np.int64(7): np.float16(-2)}, {5: 1.0, 7: -2.0}),
    ("allowed_token_ids", range(3), [0, 1, 2]),
    ("bad_words", "x", ["x"]),
    ("prompt_logprobs", np.int64(0), 0),
    ("speculative", {"num_speculative_tokens": np.int64(2)}, {"num_speculative_tokens": 2}),
    ("output_kind", "delta", RequestOutputKind.DELTA),
    ("output_kind", 2, RequestOutputKind.FINAL_ONLY),
    ("truncate_prompt_tokens", -1, -1),
    ("spaces_between_special_tokens", True, True),
]
WRONG: list[tuple[str, Any]] = [
    *(("max_tokens", v) for v in ("5", True, 4.0, np.float64(4), np.bool_(True), [4], np.array([4, 5]), b"5")),
    *(("temperature", v) for v in ("0.5", True, None, np.nan, 1j, [0.5], np.array([0.1, 0.2]), 10**400, -(10**5000))),
    *(("top_k", v) for v in ("1", None, np.nan)),
    *(("seed", v) for v in ("a", -2, 1.0, True)),
    *(("ignore_eos", v) for v in (1, 0, "true", None)),
    *(("skip_special_tokens", v) for v in (1, None)),
    *(("stop", v) for v in ({"a"}, [b"a"], 5)),
    *(("stop_token_ids", v) for v in ([True], ["1"], [None], {1: 2}, 3)),
    *(("logit_bias", v) for v in ({"a": 1}, {-1: 1}, {1: 100.1}, {1: np.nan}, {1: "1"}, {1.5: 1}, {True: 1}, [1], "x")),
    ("logit_bias", {"1": 1, 1: 2}),
    *(("allowed_token_ids", v) for v in ([], [-1], [1.5], "12", 5, [True])),
    *(("bad_words", v) for v in ([""], [" "], [5], 5)),
    *(("prompt_logprobs", v) for v in (-1, 1.5, True, "1")),
    *(("detokenize", v) for v in (None, 1)),
    *(("truncate_prompt_tokens", v) for v in (0, -2, 1.5)),
    *(("output_kind", v) for v in (None, 3, "all", 1.5, True)),
    *(("spaces_between_special_tokens", v) for v in (False, None)),
    *(("speculative", v) for v in (1, {"num_speculative_tokens": True}, [])),
]


@pytest.mark.parametrize(("name", "given", "wanted"), SAME, ids=[f"{n}={v!r}" for n, v, _ in SAME])
def test_values_become_python_s(name: str, given: Any, wanted: Any):
    value = getattr(SamplingParams(**{name: given}), name)
    assert value == wanted
    assert type(value) is type(wanted)


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n}-{place}" for place, (n, _) in enumerate(WRONG)])
def test_a_wrong_value_is_one_error(name: str, value: Any):
    with pytest.raises(RequestError, match=rf"^sampling: {name} must be .+, got ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_every_field_is_checked():
    assert set(ALLOWED) == set(vars(SamplingParams()))


def test_defaults_pass_their_own_checks_and_are_vllm_s():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.detokenize) == (1.0, 1.0, 0, True)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_of_others_are_refused_with_the_reason(name: str):
    for make in (SamplingParams, lambda **values: SamplingParams.from_mapping(values)):
        with pytest.raises(RequestError, match=rf"^sampling: unknown \['{name}'\]; known are .*; {name}: .{{10}}"):
            make(**{name: 1})
    assert SamplingParams.from_optional(**{name: None}) == SamplingParams()


def test_unknown_names_are_an_error_that_lists_the_known_ones():
    with pytest.raises(RequestError, match=r"unknown \['tempature'\]; known are \[.*'temperature'"):
        SamplingParams(tempature=0)
    with pytest.raises(RequestError, match="give each parameter once, by its name"):
        SamplingParams(1, n=2)
    with pytest.raises(RequestError, match="give each parameter once, by its name"):
        SamplingParams(*range(99))
    with pytest.raises(RequestError, match=r"unknown \['x'\]"):
        replace(SamplingParams(), x=1)


def test_parameters_that_exclude_one_another():
    with pytest.raises(RequestError, match="use detokenize=True or stop_token_ids"):
        SamplingParams(detokenize=False, stop="a")
    with pytest.raises(RequestError, match="min_tokens must be from 0 to max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(RequestError, match="output_kind is for"):
        SamplingParams.from_mapping({"output_kind": "delta"})


def test_copies_share_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, output_kind="delta")
    other = params.clone()
    assert other == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert other.stop is not params.stop
    assert other.logit_bias is not params.logit_bias


def test_a_value_that_was_set_later_is_checked_in_a_copy():
    params = SamplingParams()
    params.max_tokens = "5"
    with pytest.raises(RequestError, match=r"max_tokens must be .*, got '5'"):
        params.clone()


def test_none_is_the_default_where_it_is_optional():
    values = {"temperature": None, "top_p": None, "max_tokens": None, "logit_bias": None, "n": 2}
    assert SamplingParams.from_optional(**values) == SamplingParams(n=2)
