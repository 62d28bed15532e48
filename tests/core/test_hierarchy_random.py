"""Long random games over the hierarchy: every byte that is read is the right one, and nothing leaks or hangs."""

from __future__ import annotations

import pytest

from core.scenarios import SETUPS, Player
from core.world import World


def play(name: str, seed: int, moves: int) -> Player:
    player = Player(World(SETUPS[name]), seed)
    player.play(moves)
    player.world.run()
    player.world.check_quiet()
    return player


@pytest.mark.parametrize("name", SETUPS)
def test_random_games(name: str) -> None:
    hits = 0
    for seed in range(6):
        player = play(name, seed, 400)
        hits += sum(hit > 0 for client in player.world.finished for hit in client.hits)
    assert hits > 10, "games without hits prove little"


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_many_random_games(name: str) -> None:
    for seed in range(1000, 1150):
        play(name, seed, 600)
