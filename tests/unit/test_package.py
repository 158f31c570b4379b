"""What the distribution promises: its dependencies, its version, its lazy facade."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import django_outbox
from django_outbox import errors

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, env={}
    ).stdout.strip()


def test_there_are_three_dependencies() -> None:
    assert [re.split(r"[<>=~!\[; ]", line)[0] for line in PROJECT["dependencies"]] == ["django", "psycopg", "requests"]


def test_the_installed_metadata_names_the_same_three() -> None:
    try:
        wanted = requires("django-transactional-outbox") or []
    except ImportError:
        pytest.skip("the package is not installed in this environment")
    names = {re.split(r"[<>=~!\[; ]", line)[0] for line in wanted if "extra ==" not in line}
    assert names == {"django", "psycopg", "requests"}
    assert version("django-transactional-outbox") == django_outbox.__version__


def test_version_and_changelog_agree() -> None:
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == django_outbox.__version__ == released[0]


def test_the_classifiers_name_what_is_supported() -> None:
    classifiers = PROJECT["classifiers"]
    assert [c.split()[-1] for c in classifiers if re.search(r"Python :: 3\.", c)] == ["3.11", "3.12", "3.13"]
    assert [c.split()[-1] for c in classifiers if "Django ::" in c] == ["5.2", "6.0", "6.1"]
    assert PROJECT["requires-python"] == ">=3.11"


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(django_outbox.__file__).parent / "py.typed").exists()


def test_importing_the_package_imports_neither_models_nor_settings() -> None:
    assert python("import sys, django_outbox; print([m for m in sys.modules if m.startswith('django')])") == (
        "['django_outbox']"
    )


def test_public_names_can_be_imported_before_settings_and_apps_are_ready() -> None:
    code = "from django_outbox import *; from django.conf import settings; from django.apps import apps"
    assert python(f"{code}; print(settings.configured, apps.models_ready)") == "False False"


def test_an_app_that_loads_earlier_may_import_from_it() -> None:
    code = (
        "import os; os.environ['DJANGO_SETTINGS_MODULE'] = 'tests.settings'; import django; django.setup();"
        "from tests.earlyapp import emit_event, models; print(emit_event is models.emit_event)"
    )
    assert python(code) == "True"


@pytest.mark.parametrize("name", django_outbox.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(django_outbox, name).__doc__
    assert name in dir(django_outbox)


def test_every_error_is_public() -> None:
    assert {name for name in errors.__all__ if isinstance(getattr(errors, name), type)} <= set(django_outbox.__all__)


def test_public_names_are_sorted_and_unique() -> None:
    assert sorted(set(django_outbox.__all__)) == django_outbox.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'django_outbox' has no attribute 'emit_evnt'"):
        django_outbox.emit_evnt  # noqa: B018
