"""Parts of a model by its parameters' paths, and tensor names as patterns."""

import pytest

from jaxspec.inspect.model_report import collapse
from jaxspec.inspect.model_sizes import part_of


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("embed_VD", "embedding"),
        ("position_SD", "embedding"),
        ("head_DV", "head"),
        ("norm_D", "norms"),
        ("layers_3/attention/q_norm_C", "norms"),
        ("layers_3/attention_norm_bias_D", "norms"),
        ("segment_3/attention/indexer/q_RHC", "attention"),
        ("segment_3/attention_hyper/mix_fn_XS", "hyper-connections"),
        ("hyper_head/head_fn_NS", "hyper-connections"),
        ("layers_0/ffn/gate_up_D2F", "dense feed-forward"),
        ("layers_0/ffn/up_bias_F", "dense feed-forward"),
        ("layers_0/ffn/gate_up_ED2F", "routed experts"),
        ("segment_0/ffn/down_bias_ED", "routed experts"),
        ("segment_0/ffn/shared/down_FD", "shared experts"),
        ("segment_0/ffn/shared_gate_D1", "shared experts"),
        ("segment_0/ffn/choice_bias_E", "router"),
        ("segment_0/ffn/table_VA", "router"),
        ("mtp_0/block/ffn/down_EFD", "multi-token prediction"),
    ],
)
def test_parts(path: str, part: str):
    assert part_of(path) == part


def test_names_that_differ_in_numbers_are_one_pattern():
    experts = [f"model.layers.{y}.mlp.experts.{e}.down_proj.weight" for y in range(3, 61) for e in range(256)]
    assert collapse(experts) == ["model.layers.{3..60}.mlp.experts.{0..255}.down_proj.weight"]


def test_patterns_stand_for_exactly_their_names():
    names = ["l.1.e.0.w", "l.1.e.1.w", "l.2.e.0.w", "l.2.e.1.w", "l.3.e.1.w"]
    assert collapse(names) == ["l.3.e.1.w", "l.{1,2}.e.{0,1}.w"]
    assert collapse(["l.0.w", "l.2.w", "l.3.w", "l.4.w"]) == ["l.{0,2..4}.w"]
    assert collapse(["w1.a", "w2.a", "{x}.1", "end.2"]) == ["end.2", "w1.a", "w2.a", "{x}.1"]
    assert collapse([]) == []
