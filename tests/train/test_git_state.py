"""The state of the working folder's repository, of which nothing is run."""

import os
import shutil
import subprocess

import pytest

from headcode.train.runtime import git_state

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(*arguments):
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    return subprocess.run(["git", *settings, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init")
    (tmp_path / "repository" / "file.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path / "repository"


@pytest.fixture
def trap(tmp_path):
    """A program that leaves a mark."""
    script = tmp_path / "trap.sh"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path / 'mark'}\nexit 1\n")
    script.chmod(0o755)
    return script


def test_commit_and_changes(repository, tmp_path, monkeypatch):
    commit = git("rev-parse", "HEAD")
    assert git_state() == {"commit": commit, "changed": False}
    (repository / "file.txt").write_text("two\n")
    assert git_state() == {"commit": commit, "changed": True}
    git("checkout", "file.txt")
    (repository / "new.txt").write_text("new\n")
    assert git_state() == {"commit": commit, "changed": True}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() is None


def plant_fsmonitor(repository, trap):
    git("config", "core.fsmonitor", str(trap))


def plant_filter(repository, trap, name="evil"):
    """Every file of the working folder has to pass a program before git compares it."""
    for kind, value in (("clean", trap), ("smudge", trap), ("required", "true")):
        git("config", f"filter.{name}.{kind}", str(value))
    (repository / ".git" / "info" / "attributes").write_text(f"* filter={name}\n")
    touch(repository)


def plant_process_filter(repository, trap):
    git("config", "filter.evil.process", str(trap))
    (repository / ".gitattributes").write_text("*.txt filter=evil\n")
    touch(repository)


def plant_included_filter(repository, trap):
    (repository / ".git" / "more").write_text(f'[filter "Some Name"]\n\tclean = {trap}\n')
    git("config", "include.path", "more")
    (repository / ".git" / "info" / "attributes").write_text('* "filter=Some Name"\n* filter=Some\n')
    git("config", "filter.Some.clean", str(trap))
    touch(repository)


def plant_diff_driver(repository, trap):
    git("config", "diff.evil.command", str(trap))
    git("config", "diff.evil.textconv", str(trap))
    git("config", "diff.external", str(trap))
    (repository / ".gitattributes").write_text("*.txt diff=evil\n")
    touch(repository)


def plant_hook(repository, trap):
    (repository / ".git" / "hooks").mkdir(exist_ok=True)
    shutil.copy(trap, repository / ".git" / "hooks" / "post-index-change")
    touch(repository)


def plant_submodule(repository, trap):
    """A repository inside of the repository, with a configuration of its own."""
    git("init", "inner")
    (repository / "inner" / "file").write_text("inner\n")
    git("-C", "inner", "add", "file")
    git("-C", "inner", "commit", "-m", "inner")
    git("submodule", "add", "./inner", "inner")
    git("commit", "-m", "second")
    git("-C", "inner", "config", "core.fsmonitor", str(trap))


def plant_promisor(repository, trap):
    """An object is missing, and the remote that promised it is reached by a program."""
    git("config", "core.repositoryFormatVersion", "1")
    git("config", "extensions.partialClone", "origin")
    git("config", "remote.origin.url", str(repository))
    git("config", "remote.origin.promisor", "true")
    git("config", "remote.origin.uploadpack", str(trap))
    tree = git("rev-parse", "HEAD^{tree}")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


def touch(repository):
    os.utime(repository / "file.txt", (1, 1))  # git has to look at the content


@pytest.mark.parametrize(
    "plant",
    [
        plant_fsmonitor,
        plant_filter,
        plant_process_filter,
        plant_included_filter,
        plant_diff_driver,
        plant_hook,
        plant_submodule,
        plant_promisor,
    ],
)
def test_nothing_that_the_repository_names_is_run(repository, trap, tmp_path, plant):
    plant(repository, trap)
    mark = tmp_path / "mark"
    mark.unlink(missing_ok=True)
    commit = git("rev-parse", "HEAD")
    found = git_state()
    assert not mark.exists()
    assert found is None if plant is plant_promisor else found["commit"] == commit
    if plant is not plant_diff_driver:  # which no command of ours would look at
        subprocess.run(["git", "status", "--porcelain"], capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        assert mark.exists(), "the trap was none"


def test_a_filter_that_cannot_be_switched_off(repository, trap, tmp_path):
    plant_filter(repository, trap, name="a=b")
    (tmp_path / "mark").unlink(missing_ok=True)
    assert git_state() == {"commit": git("rev-parse", "HEAD"), "changed": None}
    assert not (tmp_path / "mark").exists()


def test_a_filter_leaves_it_open_whether_a_file_was_changed(repository):
    """As with git-lfs: without its filter, git compares what was never meant to be the same."""
    git("config", "filter.upper.clean", "tr a-z A-Z")
    git("config", "filter.upper.smudge", "tr A-Z a-z")
    (repository / ".gitattributes").write_text("*.txt filter=upper\n")
    git("add", "--renormalize", ".")
    git("add", ".")
    git("commit", "-m", "filtered")
    os.utime(repository / "file.txt", (1, 1))
    commit = git("rev-parse", "HEAD")
    assert git_state() == {"commit": commit, "changed": None}
    assert git("status", "--porcelain") == ""
    assert git_state() == {"commit": commit, "changed": False}  # git has just found out, and remembers
