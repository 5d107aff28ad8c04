"""What a device must hold, against sums made by hand."""

import pytest

from jaxspec.perf.cost import Mesh
from jaxspec.perf.device_memory import CHUNK, memory, most_rows
from jaxspec.perf.drafting import DraftCost
from tests.unit.perf.models import dense_model, routed_model


def test_parts_on_one_device():
    found = memory(routed_model(), room_bytes=1e6, rows=2, context=100, length=3)
    assert found.by_part["routed experts"] == 4800
    assert found.by_part["caches"] == 2 * (12 * 100 + 100)
    vocabulary = 2 * 50 * (2 * 4 * 4 + 5)
    assert found.by_part["buffers"] == vocabulary + 2 * 100 * 4 + CHUNK * 10 * 4 * 8
    assert found.total_bytes == sum(found.by_part.values())
    assert found.fits


def test_a_mesh_splits_what_it_can():
    one = memory(routed_model(), room_bytes=1e6, rows=8, context=100).by_part
    experts = memory(routed_model(), room_bytes=1e6, rows=8, context=100, mesh=Mesh(expert=4)).by_part
    assert experts["routed experts"] == one["routed experts"] / 4
    assert experts["router"] == one["router"] / 4
    assert experts["attention"] == one["attention"]
    assert experts["caches"] == one["caches"] / 4, "rows are spread"
    both = memory(routed_model(), room_bytes=1e6, rows=8, context=100, mesh=Mesh(expert=4, tensor=2)).by_part
    assert both["routed experts"] == one["routed experts"] / 8
    assert both["attention"] == one["attention"] / 2
    assert both["norms"] == one["norms"]
    assert both["caches"] == experts["caches"], "a shared key cannot be split"
    split = memory(dense_model(), room_bytes=1e6, rows=8, context=100, mesh=Mesh(tensor=2)).by_part
    assert split["caches"] == 8 * 8 * 100 / 2


def test_a_drafter_brings_weights_and_caches():
    draft = DraftCost("draft_model", dense_model())
    found = memory(routed_model(), room_bytes=1e6, rows=3, context=100, length=2, draft=draft).by_part
    assert found["drafter"] == 2540 + 3 * 8 * 100
    lookup = memory(routed_model(), room_bytes=1e6, rows=3, context=100, draft=DraftCost("ngram")).by_part
    assert "drafter" not in lookup


def test_prediction_caches_like_layers_of_the_model():
    prediction = routed_model(layers=(routed_model().layers[0].__class__(1, 1000.0, 1000.0),))
    model = routed_model(prediction=prediction)
    found = memory(model, room_bytes=1e6, rows=3, context=100, draft=DraftCost("mtp", prediction)).by_part
    assert found["drafter"] == pytest.approx(3 * 100 * 12 / 3)


def test_prediction_spreads_its_experts():
    layer = routed_model().layers[0]
    prediction = routed_model(layers=(layer.__class__(**{**layer.__dict__, "count": 1}),))
    parts = {**routed_model().memory_bytes, "multi-token prediction": 3000.0}
    model = routed_model(prediction=prediction, memory_bytes=parts)
    found = memory(model, room_bytes=1e6, rows=1, context=0, mesh=Mesh(expert=4)).by_part
    assert found["multi-token prediction"] == 1600 / 4 + 1400


def test_rows_that_fit():
    model, context = routed_model(), 100
    for wanted in (1, 7, 300):
        room = memory(model, room_bytes=0, rows=wanted, context=context).total_bytes
        assert most_rows(model, room_bytes=room, context=context) == wanted
    assert most_rows(model, room_bytes=1000, context=context) == 0
    assert not memory(model, room_bytes=1000, rows=1, context=context).fits
