"""Updates of an EAGLE-3 head by speculators' own class; run by an interpreter that has it.

usage: train_speculators.py DIRECTORY rows|packed trained|frozen

The directory holds ``head``, ``lessons.npz`` and ``settings.json``. Every line of the input is a number of updates,
every line of the output what they took: ``wall_s``, ``cpu_s`` and the ``loss`` of each. Rows go through one by one, or
packed into one sequence as speculators trains them. The vocabulary product is trained as ours is, or frozen as
speculators leaves it.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def load(directory: Path, head: str) -> Any:
    """The head by the peer's own loader."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    config = SpeculatorModelConfig.from_pretrained(directory / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(directory / "head", config=config, dtype=torch.float32)
    # A file without an embedding leaves it at zero there: the loader takes only what is not a number for missing.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    model.verifier_norm = torch.nn.Identity()  # the target's last hidden states are given, normalized
    model.lm_head.weight.requires_grad_(head == "trained")
    return model.train()


def batches(directory: Path, form: str) -> list[list[dict[str, Any]]]:
    """Per update the calls of the model: token i + 1 beside feature i, as its own loader shifts them."""
    given: Any = {name: torch.from_numpy(array) for name, array in np.load(directory / "lessons.npz").items()}
    found = []
    for feature, token, last in zip(given["feature"], given["token"].long(), given["last"], strict=True):
        rows, slots = token.shape[0], token.shape[1] - 1
        loss = torch.ones(rows, slots, dtype=torch.bool)
        loss[:, -1] = False  # after the last token comes nothing to learn
        shifted = {
            "hidden_states": feature[:, :-1], "input_ids": token[:, 1:], "verifier_last_hidden_states": last[:, 1:],
            "loss_mask": loss, "position_ids": torch.arange(1, slots + 1).repeat(rows, 1),
            "document_ids": torch.arange(rows)[:, None].repeat(1, slots),
        }  # fmt: skip
        parts = [slice(i, i + 1) for i in range(rows)] if form == "rows" else [slice(None)]
        found.append([{k: x[part].reshape(1, -1, *x.shape[2:]) for k, x in shifted.items()} for part in parts])
    return found


def per_first(metrics: dict[str, Any], slots: int, rounds: int) -> float:
    """The loss with every round divided by the slots of the first, where the peer divides each by its own."""
    return sum(metrics[f"loss_{j}_sum"].item() * (slots - j) / slots for j in range(rounds))


def answer(record: dict[str, Any]) -> None:
    """One line of the output."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main(place: str, form: str, head: str) -> None:
    """Trains until the input ends."""
    from speculators.losses import resolve_loss_config

    directory = Path(place)
    s = json.loads((directory / "settings.json").read_text())
    model, lessons = load(directory, head), batches(directory, form)
    given = {"ttt_steps": s["rounds"], "ttt_step_loss_decay": s["decay"]}
    given["loss_config"] = resolve_loss_config("kl_div", "eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, s["learning_rate"], s["betas"], s["eps"], weight_decay=0, fused=True)
    answer({"parameters": sum(p.numel() for p in trained)})
    done = 0
    for line in sys.stdin:
        found, wall, cpu = [], time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            calls, total = lessons[done % len(lessons)], 0.0
            for call in calls:
                with torch.autocast("cpu", torch.bfloat16, enabled=s["dtype"] == "bfloat16"):
                    _, loss, metrics = model(**call, **given)
                (loss / len(calls)).backward()
                total += per_first(metrics, int(call["loss_mask"].sum()), s["rounds"]) / len(calls)
            torch.nn.utils.clip_grad_norm_(trained, s["clip"])
            adamw.step()
            adamw.zero_grad()
            found.append(total)
            done += 1
        spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        answer(spent | {"loss": found})


if __name__ == "__main__":
    main(*sys.argv[1:])
