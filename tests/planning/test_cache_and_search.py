"""What is planned again and what is not, which candidates a search tries, and what it prefers."""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from tests.models.tiny import tiny_config
from vibethinker_jax.models.qwen2 import REMAT_POLICIES
from vibethinker_jax.planning import cache
from vibethinker_jax.planning.search import candidates, pareto


def test_what_was_stored_is_found_again_and_nothing_else(monkeypatch: Any, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 8})
    assert cache.load(key) is None
    cache.store(key, {"fits": True})
    assert cache.load(key) == {"fits": True}
    assert cache.load(cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 8})) == {"fits": True}


def test_a_damaged_plan_counts_as_none(monkeypatch: Any, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.store("damaged", {"fits": True})
    (cache.directory() / "damaged.json").write_text('{"fits": tr')
    assert cache.load("damaged") is None


def test_a_change_of_anything_that_decides_a_plan_changes_its_key(monkeypatch: Any) -> None:
    keys = {
        cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 8}),
        cache.key({"remat": "none"}, "v5e:2x2", {"hidden_size": 8}),
        cache.key({"remat": "full"}, "v5e:2x4", {"hidden_size": 8}),
        cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 9}),
    }
    monkeypatch.setattr(cache, "_version", lambda package: "another")
    keys.add(cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 8}))
    monkeypatch.setattr(cache, "_code_digest", lambda: "another")
    keys.add(cache.key({"remat": "full"}, "v5e:2x2", {"hidden_size": 8}))
    assert len(keys) == 6


def search_config(**changes: Any) -> ConfigDict:
    return ConfigDict(
        {
            "stage": "sft",
            "sequence_length": 48,
            "global_batch_rows": 4,
            "micro_batch_rows": 0,
            "mesh": {"replica": 1, "fsdp": 1, "context": -1, "tensor": 1, "devices": 0},
            **changes,
        }
    )


def shapes(config: ConfigDict, chips: int) -> list[tuple[int, int, int]]:
    found = candidates(config, tiny_config(), chips)
    assert len(found) == len(set(map(str, found)))
    assert {remat for _, remat in found} == set(REMAT_POLICIES)
    return sorted({(mesh["fsdp"], mesh["context"], mesh["tensor"]) for mesh, _ in found})


def test_candidates_divide_rows_heads_and_the_zigzag_chunks() -> None:
    # Of fsdp x context x tensor = 8: fsdp 8 does not divide 4 rows, tensor 4 and 8 not 6 heads; 16 chunks do 48 tokens.
    assert shapes(search_config(), 8) == [(1, 4, 2), (1, 8, 1), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1)]


def test_a_fixed_micro_batch_limits_the_data_shards() -> None:
    assert shapes(search_config(micro_batch_rows=2), 8) == [(1, 4, 2), (1, 8, 1), (2, 2, 2), (2, 4, 1)]


def test_the_pareto_front_holds_what_nothing_beats() -> None:
    #        least memory, fastest, beaten by both, between them, does not fit, beaten at equal memory
    points = [(1.0, 10.0), (4.0, 30.0), (4.0, 9.0), (2.0, 20.0), None, (2.0, 19.0)]
    assert pareto(points) == [True, True, False, True, False, False]


def test_equal_points_are_both_on_the_front() -> None:
    assert pareto([(1.0, 1.0), (1.0, 1.0)]) == [True, True]


def test_an_odd_number_of_chips_has_candidates_where_it_divides() -> None:
    # 3 chips: fsdp 3 does not divide 4 rows, 2 x 3 chunks divide 48 tokens, tensor 3 divides 6 heads
    assert shapes(search_config(), 3) == [(1, 1, 3), (1, 3, 1)]
