"""The harness of tests/ranks notices what it is for: small suites that go wrong on one rank only."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from starting import ROOT, RUNNER, Finished, mpiexec, run_command


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Finished]:
    """Runs the source of a test file on ranks under the harness."""

    def run(source: str, n: int = 2) -> Finished:
        shutil.copy(ROOT / "tests" / "ranks" / "conftest.py", tmp_path)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(textwrap.dedent(source))
        pytest_run = ["-m", "pytest", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
        command = [mpiexec(), "-n", str(n), sys.executable, "-c", RUNNER, *pytest_run]
        return run_command(command, 40, env={"COLUMNS": "200"}, cwd=tmp_path)

    return run


def test_failure_on_one_rank(suite: Callable[..., Finished]) -> None:
    """Each is reported once, with its rank, its traceback and its output; the tests after it run."""
    result = suite(
        """
        from mpi4py import MPI
        import pytest
        RANK = MPI.COMM_WORLD.Get_rank()

        def test_fails_on_rank_1():
            print("written by", RANK)
            assert RANK != 1, "rank one's own words"

        def test_skipped_on_rank_1():
            if RANK == 1:
                pytest.skip("no luck here")

        def test_skipped_everywhere():
            pytest.skip("nobody needs it")

        @pytest.fixture
        def breaks_on_rank_1():
            assert RANK == 0, "set-up of rank one"

        def test_setup_fails_on_rank_1(breaks_on_rank_1):
            MPI.COMM_WORLD.Barrier()  # would hang, were it entered by rank 0 alone

        def test_ends_while_the_other_shares(share):
            assert RANK != 1, "gone early"
            share(RANK)

        def test_wrong_value_and_right_count(expect):
            expect(RANK, 0, "the rank")
            MPI.COMM_WORLD.Barrier()

        def test_works():
            MPI.COMM_WORLD.Barrier()
        """
    )
    assert result.status == 1, result.output
    assert "4 failed, 1 passed, 1 skipped, 1 error" in result.output
    assert result.output.count("test session starts") == 1  # rank 0 alone reports
    for words in (
        "failed on rank 1 of 2",
        "rank one's own words",
        "written by 1",
        "skipped on some ranks only",
        "no luck here",
        "set-up of rank one",
        "rank 1 has ended the test, this rank is still in it",
        "the rank: got 1, expected 0",
        "FAILED test_it.py::test_fails_on_rank_1 - rank 1: AssertionError: rank one's own words",
    ):
        assert words in result.output, words


def test_hang_on_one_rank(suite: Callable[..., Finished]) -> None:
    """Every rank is dumped, also the one that has ended its test and waits for the other; the job ends."""
    result = suite(
        """
        from mpi4py import MPI
        import pytest
        RANK = MPI.COMM_WORLD.Get_rank()

        @pytest.mark.limit(1)
        def test_hangs_on_rank_1():
            if RANK == 1:
                MPI.COMM_WORLD.Barrier()
        """
    )
    assert result.status != 0
    assert result.seconds < 20
    for words in (
        "[rank 0 of 2] test_it.py::test_hangs_on_rank_1 did not end within 1 s",
        "[rank 1 of 2] test_it.py::test_hangs_on_rank_1 did not end within 1 s",
        "in exchange_outcomes",
        "in test_hangs_on_rank_1",
    ):
        assert words in result.output, words + "\n" + result.output


def test_lost_step_ends_the_run(suite: Callable[..., Finished]) -> None:
    result = suite(
        """
        from mpi4py import MPI
        RANK = MPI.COMM_WORLD.Get_rank()

        def test_times_out_on_rank_0():
            if RANK == 0:
                raise TimeoutError("nobody came")

        def test_is_never_reached():
            print("reached")
        """
    )
    assert result.status == 1, result.output
    assert "TimeoutError: nobody came" in result.output
    assert "a rank timed out, lost a peer or its transport: the run stops here" in result.output
    assert "1 failed in" in result.output


def test_collections_that_differ(suite: Callable[..., Finished]) -> None:
    result = suite(
        """
        from mpi4py import MPI

        def test_here_on_all():
            pass

        if MPI.COMM_WORLD.Get_rank() == 1:
            def test_here_on_rank_1():
                pass
        """
    )
    assert result.status not in (0, 1), result.output
    assert "the ranks did not collect the same tests" in result.output
    assert "only on rank 1: test_it.py::test_here_on_rank_1" in result.output
