"""Prompts are cut into few chunks with little padding, and several short ones share one."""

import numpy as np

from jaxspec.decode.chunks import PASS, UnreadPrompt, choose_chunk, cut, next_size
from jaxspec.serve.engine_spec import BUCKETS, JOINT


def sizes_of(count: int, sizes: tuple[int, ...]) -> list[int]:
    """Sizes of the chunks in which so many tokens are read."""
    prompt, cuts = UnreadPrompt(0, np.arange(count + 1, dtype=np.int32)), []
    while prompt.left:
        size, chosen = choose_chunk([prompt], sizes)
        cut(chosen, size)
        cuts.append(size)
    return cuts


def test_chunks_cover_a_prompt_but_for_its_last_token():
    prompt, cuts = UnreadPrompt(3, np.arange(1, 12, dtype=np.int32)), []
    while prompt.left:
        size, chosen = choose_chunk([prompt], (2, 4))
        chunk = cut(chosen, size)
        cuts.append((size, chunk.row_R.tolist(), chunk.start_R[0], chunk.count_R[0], chunk.token_RX[0].tolist()))
    assert cuts == [
        (4, [3], 0, 4, [1, 2, 3, 4, 5]), (4, [3], 4, 4, [5, 6, 7, 8, 9]), (2, [3], 8, 2, [9, 10, 11]),
    ]  # fmt: skip
    assert UnreadPrompt(0, np.arange(1)).left == 0, "the last token is the first anchor"


def test_little_of_what_is_computed_is_padding():
    wasted = {}
    for length in range(1, 2049):
        computed = sum(sizes_of(length - 1, BUCKETS))
        wasted[length] = 0.0 if not computed else 1 - (length - 1) / computed
    assert np.mean(list(wasted.values())) <= 0.05
    assert max(waste for length, waste in wasted.items() if length > 32) <= 0.5
    assert max(waste for length, waste in wasted.items() if length > 256) <= 0.16


def test_a_cut_is_as_cheap_as_any():
    def cheapest(count: int, sizes: tuple[int, ...], known: dict[int, int]) -> int:
        if count <= 0:
            return 0
        if count not in known:
            known[count] = min(size + PASS + cheapest(count - size, sizes, known) for size in sizes)
        return known[count]

    for sizes in (BUCKETS, (16, 48), (8, 32)):
        known: dict[int, int] = {}
        for count in range(1, 600):
            cuts = sizes_of(count, sizes)
            assert sum(cuts) + PASS * len(cuts) == cheapest(count, sizes, known), (sizes, count)
            assert cuts == sorted(cuts, reverse=True), "the padding comes last"
    assert next_size(10**6, BUCKETS) == BUCKETS[-1]


def test_short_prompts_share_a_chunk_where_that_is_cheaper():
    def chosen(*lengths: int) -> tuple[int, list[int]]:
        prompts = [UnreadPrompt(row, np.zeros(n + 1, np.int32)) for row, n in enumerate(lengths)]
        size, taken = choose_chunk(prompts, BUCKETS, (JOINT, 32))
        return size, [prompt.row for prompt in taken]

    assert chosen(20, 20, 20, 20, 20) == (32, [0, 1, 2, 3])
    assert chosen(84, 84, 84, 84) == (32, [0, 1, 2, 3])
    assert chosen(20, 20, 20) == (32, [0]), "too few"
    assert chosen(1000, 1000, 1000, 1000) == (256, [0]), "no cheaper"
    assert chosen(60, 1, 1, 1) == (64, [0]), "mostly padding"
    chunk = cut([UnreadPrompt(2, np.arange(9, dtype=np.int32), start=3), UnreadPrompt(0, np.arange(2))], 4)
    assert chunk.token_RX.tolist() == [[3, 4, 5, 6, 7], [0, 1, 0, 0, 0]]
    assert (chunk.row_R.tolist(), chunk.start_R.tolist(), chunk.count_R.tolist()) == ([2, 0], [3, 0], [4, 1])
