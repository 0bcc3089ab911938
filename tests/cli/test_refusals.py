"""What is wrong is said in one message, by the parent, before any rank is started."""

import sys

import pytest

from lightning_par.cli import launch
from lightning_par.cli.main import main


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs `lightning-par ...` in this process and an empty folder; returns its exit message and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_preload", lambda: None)
    monkeypatch.setattr(launch, "_start_ranks", lambda job: pytest.fail("ranks were started"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-par", *arguments])
        with pytest.raises(SystemExit) as error:
            main()
        assert error.value.code
        captured = capsys.readouterr()
        return f"{error.value.code}\n{captured.out}{captured.err}"

    return run


def test_an_impossible_layout_is_refused_with_everything_that_is_wrong_with_it(command):
    message = command("train", "trainer.devices=4", "parallel.tp=3", "parallel.pp=5")
    for part in ("for 4 reasons", "world size 4", "pp=5", "4 attention heads", "2 key-value heads"):
        assert part in message
    assert "zero=7" in command("train", "parallel.zero=7")
    message = command("train", "precision=16-true", "precision.loss_scale.rule=apex", "parallel.tp=3")
    assert "rule='apex' must be one of torch, megatron, deepspeed" in message
    assert "world size 1" in message


def test_h5_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(command, tmp_path):
    config = tmp_path / "here" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("seed: 1\n")
    assert "hydra.run.dir=here holds a run already" in command("train", "hydra.run.dir=here")
    assert "hydra.sweep.dir=here holds a run already" in command("train", "-m", "hydra.sweep.dir=here", "seed=1,2")
    assert config.read_text() == "seed: 1\n"


def test_unknown_commands_keys_and_checkpoints_are_named(command):
    assert "there is no command 'verify'; choose one of: train" in command("verify")
    assert "Key 'modle' is not in struct" in command("train", "modle=gpt")
    assert "nowhere: there is no such checkpoint" in command("train", "ckpt_path=nowhere")


def test_several_nodes_need_a_launcher(monkeypatch):
    job = launch.Job({"trainer": {"num_nodes": 2, "devices": 1, "accelerator": "cpu"}}, {})
    with pytest.raises(SystemExit, match=r"trainer\.num_nodes=2: start this command on every node"):
        launch._start_ranks(job)


def test_help_names_every_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-par"])
    main()
    assert "train" in capsys.readouterr().out
