"""Configuration: one set of knobs, three sources, nothing unknown accepted."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hortus import cli, config
from hortus.errors import StartError

FIELDS = [(s, f) for s, cls in config.SECTIONS.items() for f in dataclasses.fields(cls)]


def test_names_are_unique_over_sections():
    names = [f.name for _, f in FIELDS]
    assert len(names) == len(set(names)), "a flag must say which section it belongs to by its name alone"


def test_order_of_sources(tmp_path: Path):
    file = tmp_path / "hortus.toml"
    file.write_text('[ivy]\nport = 1\nhost = "a"\nmax_inputs = 3\n[tulip]\nin_flight = 3\n')
    c = config.load(file=file, environ={"HORTUS_PORT": "2", "HORTUS_HOST": "b", "PATH": "x"}, flags={"port": "3"})
    assert (c.ivy.port, c.ivy.host, c.ivy.max_inputs, c.tulip.in_flight) == (3, "b", 3, 3)


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        ("env", {"HORTUS_PROT": "1"}, "HORTUS_PORT"),
        ("env", {"HORTUS_MODEL": "demo"}, "HORTUS_MODEL is no setting: the model is named on the command line alone"),
        ("toml", '[rose]\nmodel = "demo"', "model is no setting: the model is named on the command line alone"),
        ("toml", 'model = "demo"', "model is no setting"),
        ("env", {"HORTUS_PORT": "x"}, "HORTUS_PORT: 'x' is not a whole number"),
        ("env", {"HORTUS_PORT": "-1"}, "at least 0"),
        ("env", {"HORTUS_AUTO_TRUNCATE": "maybe"}, "true or false"),
        ("env", {"HORTUS_TIMEOUT_S": "nan"}, "finite"),
        ("env", {"HORTUS_DTYPE": "int3"}, "one of auto, float32"),
        ("toml", "[ivy]\nprot = 1", "did you mean port"),
        ("toml", "[ivi]\nport = 1", "did you mean ivy"),
        ("toml", "ivy = 1", "must be a table"),
        ("toml", "[ivy]\nport = 1.5", "whole number"),
        ("toml", "[ivy]\nport = true", "a number"),
        ("toml", "[ivy]\nhost = 1", "text"),
        ("toml", "[ivy", "--config"),
        ("flag", {"max_inputs": "0"}, "--max-inputs: '0' is not at least 1"),
        ("flag", {"timeout_s": "1e10"}, r"--timeout-s: '1e10' is not at most 1e\+09"),
        ("flag", {"max_queue_tokens": str(2**70)}, r"is not at most 1e\+12"),
        ("flag", {"threads": "5000"}, "--threads: '5000' is not at most 4096"),
        ("flag", {"graph_bucket": "24"}, "--graph-bucket: '24' is not a multiple of 16"),
        ("toml", "[ivy]\nmax_inputs = inf", "max_inputs: inf is not a whole number"),
        ("toml", "[ivy]\ntimeout_s = 1" + 400 * "0", "is not a number"),
    ],
)
def test_refused_by_name(tmp_path: Path, where, text, said):
    file = tmp_path / "c.toml"
    if where == "toml":
        file.write_text(text)
    with pytest.raises(StartError, match=said.replace("[", r"\[")):
        config.load(
            file=file if where == "toml" else None,
            environ=text if where == "env" else {},
            flags=text if where == "flag" else {},
        )


def test_a_byte_order_mark_is_passed_over(tmp_path: Path):
    (tmp_path / "c.toml").write_text("[ivy]\nport = 7", encoding="utf-8-sig")
    assert config.load(file=tmp_path / "c.toml").ivy.port == 7


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(StartError, match=r"nowhere\.toml"):
        config.load(file=tmp_path / "nowhere.toml")


@given(st.sampled_from(FIELDS), st.text(max_size=12))
def test_any_text_is_a_value_or_a_named_refusal(pair, text):
    _, f = pair
    try:
        config.load(environ={config.ENV_PREFIX + f.name.upper(): text})
    except StartError as e:
        assert f.name.upper() in str(e)


def test_help_covers_every_knob():
    text = cli.parser().format_help()
    commands = next(a for a in cli.parser()._actions if a.dest == "command").choices
    helps = {name: commands[name].format_help() for name in ("serve", "tulip", "ivy", "embed")}
    assert all(name in text for name in helps)
    for section, f in FIELDS:
        flag = "--" + f.name.replace("_", "-")
        wanted = [name for name in helps if cli.takes(name, section, f.name)]
        assert wanted, f"no command takes {flag}"
        for name in wanted:
            assert flag in helps[name]
        assert len(f.metadata["help"]) > 15, f.name


def test_unknown_flag_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["serve", "x", "--prot", "1"])
    assert e.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_bad_value_is_one_line_not_a_traceback(capsys):
    assert cli.main(["serve", "x", "--port", "many"]) == 1
    err = capsys.readouterr().err
    assert err == "hortus: --port: 'many' is not a whole number\n"


@pytest.mark.parametrize(
    "flag", ["--link-token", "--link-ca", "--link-cert", "--link-key", "--silence-s", "--slow-start-s"]
)
def test_flags_of_a_link_that_is_not_there_are_refused(capsys, flag):
    assert cli.main(["serve", "/nowhere", flag, "77"]) == 1
    assert capsys.readouterr().err.startswith(f"hortus: {flag}: there is no link in one process; it needs --gateways")


@pytest.mark.parametrize(
    "words", [["serve", "/nowhere", "--gateways", "2"], ["tulip", "/nowhere"], ["ivy", "--replica", "h:1"]]
)
def test_several_processes_name_their_extra_before_any_is_started(capsys, monkeypatch, words):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "grpc_health" else found(name))
    assert cli.main(words) == 1
    assert (
        capsys.readouterr().err
        == "hortus: several processes need the package grpc_health: pip install 'hortus[grpc]'\n"
    )


@pytest.mark.parametrize("switch", ["--auto-truncate", "--offline", "--no-page"])
@pytest.mark.parametrize("value", ["", "=true", " true", "=false", " off"])
def test_a_switch_does_not_swallow_the_model(switch: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(
        cli, "_run", lambda command, model, settings, supervised: seen.update(model=model, s=settings) or 0
    )
    assert cli.main(["serve", *f"{switch}{value}".split(" "), "demo", "--port", "1"]) == 0
    assert seen["model"] == "demo"
    name = switch[2:].replace("-", "_")
    [got] = [getattr(part, name) for part in (seen["s"].ivy, seen["s"].rose) if hasattr(part, name)]
    assert got == (value.strip(" =") not in ("false", "off"))


def test_secrets_are_shown_nowhere() -> None:
    told = {f.name for _, f in FIELDS if "Better set in the environment" in f.metadata["help"]}
    hidden = [(s, f.name) for s, f in FIELDS if not f.repr]
    assert told <= {name for _, name in hidden}
    for name, field in hidden:
        section = config.SECTIONS[name]
        assert "hush" not in repr(section(**{field: "hush"}))
        with pytest.raises(StartError) as refused:
            config.parse(section, field, "hush\n", field)
        assert str(refused.value) == f"{field}: what is given is not a line of text"
