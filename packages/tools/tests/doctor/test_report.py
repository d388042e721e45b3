"""What is printed: the table, the JSON document, and the block for an issue."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from polyxla.plugin import Holder, from_environ
from polyxla_tools.doctor import report
from polyxla_tools.doctor.examination import Facts, examine, gather
from polyxla_tools.doctor.findings import Finding, Status
from polyxla_tools.doctor.secrets import scrubbed, shown

FINDINGS = [
    Finding(Status.OK, "disk", "there is space"),
    Finding(Status.NOTE, "variables", "a variable is old", "Unset it."),
    Finding(Status.PROBLEM, "chips", "the chips are gone", "Find them."),
]


@pytest.fixture
def facts(environ: dict[str, str]) -> Facts:
    secrets = {"HF_TOKEN": "hf_12345678", "POLYXLA_XRT_TOKEN_FILE": "/etc/token", "HOME": "/srv/me"}
    environ |= {**secrets, "PJRT_DEVICE": "CPU", "TPU_API_TOKEN": "s3cret-of-mine"}
    return gather(environ, from_environ(environ))


def test_problems_come_last(facts: Facts) -> None:
    holder = Holder(7, "python train.py --password=x", ("/dev/accel0",))
    findings = examine(replace(facts, host=replace(facts.host, holders=(holder,))), None, 0)
    order = [finding.status for finding in findings]
    assert order == sorted(order, key=[Status.OK, Status.NOTE, Status.PROBLEM].index)
    assert findings[-1].found == "the TPU is in use: process 7 (python train.py) has /dev/accel0 open"


def test_the_table_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_findings([Finding(Status.OK, "runtime", "train.py:100: [red]")])
    assert "train.py:100: [red]" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_findings(FINDINGS)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "ok       disk       there is space",
        "note     variables  a variable is old",
        "                    → Unset it.",
        "problem  chips      the chips are gone",
        "                    → Find them.",
        "1 problem and 1 note: do what follows the arrows.",
    ]


def test_without_a_problem_the_machine_can_train() -> None:
    assert report.summary(FINDINGS[:2]) == "0 problems and 1 note: this machine can train."


def test_the_document_has_all_facts_and_no_secret(facts: Facts) -> None:
    document = json.loads(json.dumps(report.as_json(facts, None, FINDINGS)))
    assert document["ok"] is False
    assert document["findings"][1] == {
        "status": "note",
        "subject": "variables",
        "found": "a variable is old",
        "fix": "Unset it.",
    }
    assert set(document) == {
        *("ok", "findings", "python", "versions", "system", "cores", "memory", "shared_memory", "disks"),
        *("chips", "device_files", "holders", "runtime", "devices", "variables", "trial"),
    }
    assert document["versions"]["torch-xla"] == "2.9.0"
    assert document["runtime"] == {"name": "pjrt", "reason": "PJRT_DEVICE=CPU"}
    assert document["variables"] == {
        "PJRT_DEVICE": "CPU",
        "POLYXLA_XRT_TOKEN_FILE": "/etc/token",
        "TPU_API_TOKEN": "(hidden)",
    }
    assert document["trial"] is None


def test_the_block_has_what_an_issue_needs_and_no_secret(facts: Facts) -> None:
    leak = "hf_12345678 was refused by https://me:pass@host/ in /srv/me/run"
    block = report.as_block(facts, [*FINDINGS, Finding(Status.PROBLEM, "trial", leak, "Look.")])
    assert re.fullmatch(r"```text\n.*\n```", block, re.DOTALL)
    for line in (
        r"python      3\.1\d\.\d+",
        r"frameworks  torch 2\.9\.1, torch_xla 2\.9\.0.*",
        r"polyxla     .*core.* 0\.1\.0",
        r"system      .*glibc.*",
        r"runtime     pjrt: PJRT_DEVICE=CPU",
        r"device      0 CPU device 0 of torch_xla, host 0",
        r"variable    POLYXLA_XRT_TOKEN_FILE=/etc/token",
        r"variable    TPU_API_TOKEN=\(hidden\)",
        r"note        variables: a variable is old",
        r"problem     chips: the chips are gone",
        r"problem     trial: \(hidden\) was refused by https://\(hidden\)@host/ in ~/run",
    ):
        assert re.search(f"^{line}$", block, re.MULTILINE), line
    assert "s3cret" not in block
    assert "there is space" not in block


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("POLYXLA_XRT_TLS_KEY", "/etc/key.pem", "/etc/key.pem"),
        ("POLYXLA_XRT_TLS_KEY", "-----BEGIN PRIVATE KEY-----", "(hidden)"),
        ("TPU_LIBRARY_PATH", "libtpu.so", "libtpu.so"),
        ("XLA_PROXY", "http://user:word@proxy:1", "http://(hidden)@proxy:1"),
        ("aws_secret_access", "abc", "(hidden)"),
        ("PJRT_AUTH_HEADER", "Basic dXNlcjp3b3Jk", "(hidden)"),
        ("TPU_SESSION", "71cf0a", "(hidden)"),
        ("POLYXLA_PWD", "swordfish", "(hidden)"),
        ("POLYXLA_XRT_TOKEN", "/8fXq2b9aT7uWc1k", "(hidden)"),
        ("TPU_APIKEY", "x", "(hidden)"),
        ("LIBTPU_INIT_ARGS", "--token=a1b2c3 --xla_x=true", "--token=(hidden) --xla_x=true"),
        ("LIBTPU_INIT_ARGS", "--api_key a1b2c3 --level 3", "--api_key (hidden) --level 3"),
        ("LIBTPU_INIT_ARGS", "--token_file=/etc/t --x=1", "--token_file=/etc/t --x=1"),
        ("XLA_PROXY", "https://host/x?sig=abcd1234&n=3", "https://host/x?sig=(hidden)&n=3"),
        ("XRT_HEADERS", "Authorization: Bearer abc.def-123", "Authorization: (hidden) (hidden)"),
        ("XRT_EXTRA", "ghp_0123456789abcdef", "(hidden)"),
        ("TPU_OTHER", "kX93bQz7TfLm2Rv8Yw1c", "(hidden)"),
        ("TPU_OTHER", "9e107d9d372bb6826bd81d3542a419d6", "(hidden)"),
        ("TPU_PROCESS_ADDRESSES", "localhost:8476,localhost:8477", "localhost:8476,localhost:8477"),
        (
            "TPU_WORKER_HOSTNAMES",
            "t1v-n-0a1b2c3d-w-0,t1v-n-0a1b2c3d-w-1",
            "t1v-n-0a1b2c3d-w-0,t1v-n-0a1b2c3d-w-1",
        ),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8", "--xla_force_host_platform_device_count=8"),
        ("XRT_TPU_CONFIG", "localservice;0;localhost:51011", "localservice;0;localhost:51011"),
        (
            "TPU_LIBRARY_PATH",
            "/a/9e107d9d372bb6826bd81d3542a419d6.so",
            "/a/9e107d9d372bb6826bd81d3542a419d6.so",
        ),
        ("XLA_KEYBOARD", "us", "us"),
    ],
)
def test_values_of_secrets_are_hidden_and_paths_are_shown(name: str, value: str, expected: str) -> None:
    assert shown(name, value) == expected


def test_a_short_secret_does_not_tear_words_apart() -> None:
    assert scrubbed("python 3", {"A_TOKEN": "on"}) == "python 3"


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("worker said: a1b2c3d4", {"LIBTPU_INIT_ARGS": "--token=a1b2c3d4"}, "worker said: (hidden)"),
        ("curl --password swordfish http://h", {}, "curl --password (hidden) http://h"),
        ("in /srv/project and ubuntu", {"PWD": "/srv/project", "XDG_SESSION_DESKTOP": "ubuntu"}, None),
        ("keys: 3, tokenizer: /srv/t, author: me", {}, "keys: (hidden), tokenizer: /srv/t, author: me"),
        ("torch 2.9.1+gitd38164a, 12 tokens a step", {}, None),
    ],
)
def test_secrets_are_hidden_wherever_they_stand(
    text: str, environ: dict[str, str], expected: str | None
) -> None:
    assert scrubbed(text, environ) == (expected or text)


def test_the_document_names_no_secret_in_its_findings(facts: Facts) -> None:
    leak = Finding(Status.PROBLEM, "trial", "ran with --token=a1b2c3d4 and s3cret-of-mine", "Look.")
    text = json.dumps(report.as_json(facts, None, [leak]))
    assert "ran with --token=(hidden) and (hidden)" in text
    assert "a1b2c3d4" not in text
    assert "s3cret" not in text
