"""
The admin: what is dead, why, and what to press.

Nothing is edited here; retry and discard go through the verbs of ``lease.py``. Every
list is an ordered walk of one index with an end: there is no count over the table, no
sort of it, and a filter that no index serves looks only at the newest rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.db.models.fields.json import KT, KeyTransform  # noqa: F401
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil

from django_outbox.conf import get_settings
from django_outbox.events import EVENTS, registry
from django_outbox.lease import DISCARDABLE, RETRYABLE, Report, discard, retry
from django_outbox.models import OutboxEvent, Status

if TYPE_CHECKING:
    from django.contrib.auth.base_user import AbstractBaseUser  # noqa: F401

__all__ = ["OutboxEventAdmin"]
