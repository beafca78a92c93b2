"""What a process sees of the others that do a sweep with it."""

import itertools
import threading
import time
from pathlib import Path

import jax
import pytest

from fcjax import processes


@pytest.fixture
def team_of_two(monkeypatch, tmp_path):
    """Seen from process 0, of whose sweep the word is "this"."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_BEAT_S", 0.0)
    team = processes.Team(tmp_path)
    team.begin("this")
    return team


@pytest.fixture
def sign(tmp_path):
    """Gives a sign of life of process 1."""
    words = itertools.count()

    def give(task, does):
        (tmp_path / ".process-1-of-2").write_text(f"word{next(words)} {task} {does}")

    return give


def test_parts_are_disjoint_and_complete(team_of_two):
    other = processes.Team(Path())
    other.index = 1
    assert team_of_two.part(range(5)) == range(0, 5, 2)
    assert sorted([*team_of_two.part(range(5)), *other.part(range(5))]) == list(range(5))


def test_one_that_never_was(team_of_two, monkeypatch):
    with team_of_two as team:
        team.check()
        monkeypatch.setattr(processes, "_ABSENT_S", 0.0)
        with pytest.raises(RuntimeError, match=r"process 1 of 2 gave .* it did not begin, or does not have"):
            team.check()


def test_what_another_day_left_behind_is_no_sign_of_life(team_of_two, sign, monkeypatch):
    sign("this", "rests")
    with team_of_two as team:
        assert not team.have_rested(1)
        sign("this", "works")
        team.check()
        assert not team.have_rested(1)
        monkeypatch.setattr(processes, "_SILENT_S", 0.0)
        with pytest.raises(RuntimeError, match="it has ended"):
            team.check()


@pytest.mark.parametrize("text", ["", "word7 this", "word7 this wor"])
def test_half_a_sign_or_none_is_no_news(text, team_of_two, sign, tmp_path):
    with team_of_two as team:
        sign("this", "rests")
        team.check()
        (tmp_path / ".process-1-of-2").write_text(text)
        team.check()
        assert team.have_rested(1)


def test_one_that_rests_is_not_dead(team_of_two, sign, monkeypatch):
    monkeypatch.setattr(processes, "_SILENT_S", 0.0)
    with team_of_two as team:
        sign("this", "rests")
        team.check()
        team.check()
        monkeypatch.setattr(processes, "_UNSEEN_S", 0.0)
        with pytest.raises(RuntimeError, match="process 1 of 2 has finished, but not all of its runs can be seen"):
            team.check()


def test_one_that_does_another_sweep(team_of_two, sign):
    with team_of_two as team:
        sign("-", "works")  # what it does is not known yet
        team.check()
        for does in ("waits", "rests"):  # it has not yet left the sweep before this one
            sign("other", does)
            team.check()
            assert not team.have_rested(1)
        sign("other", "works")
        with pytest.raises(
            RuntimeError, match="process 1 of 2 does another sweep than this one, or has another version"
        ):
            team.check()


@pytest.mark.parametrize("task", ["-", "other"])
def test_one_that_has_gone_on_to_another_sweep_has_rested(task, team_of_two, sign, monkeypatch):
    with team_of_two as team:
        sign("this", "works")
        assert not team.have_rested(1)
        sign(task, "works")
        team.check()
        assert team.have_rested(1)


def wait_for_rest(team, index):
    for _ in range(1000):
        if team.have_rested(index):
            return
        team.pause()
    raise AssertionError


def test_nobody_waits_for_ever_for_one_that_died_before_it_rested(team_of_two, sign, monkeypatch):
    """As the others wait for process 0 to write a file."""
    monkeypatch.setattr(processes, "_POLL_S", 0.01)
    monkeypatch.setattr(processes, "_BEAT_S", 0.05)
    monkeypatch.setattr(processes, "_SILENT_S", 0.3)
    with team_of_two as team:
        sign("this", "waits")
        with pytest.raises(RuntimeError, match="process 1 of 2 gave no sign of life for 0 s: it has ended"):
            wait_for_rest(team, 1)


def test_one_that_comes_late_finds_the_others_resting(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_POLL_S", 0.01)
    monkeypatch.setattr(processes, "_BEAT_S", 0.05)
    first, late = processes.Team(tmp_path), processes.Team(tmp_path)
    late.index = 1
    left = []

    def of_the_first():
        with first as team:
            team.begin("this")
            team.rest()
        left.append(time.monotonic())

    thread = threading.Thread(target=of_the_first)
    thread.start()
    time.sleep(0.5)
    assert not left
    came = time.monotonic()
    with late as team:
        team.begin("this")
        wait_for_rest(team, 0)
        team.rest()
    thread.join(10)
    assert came < left[0]


def test_that_another_died_does_not_spoil_what_is_complete(team_of_two, sign, monkeypatch):
    monkeypatch.setattr(processes, "_SILENT_S", 0.0)
    with team_of_two as team:
        sign("this", "waits")
        with pytest.warns(UserWarning, match="all runs are there, but process 1 of 2 gave no sign of life"):
            team.rest()


def test_several_processes_need_a_folder(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 processes do this sweep together: give `keep`"):
        processes.Team(None)
