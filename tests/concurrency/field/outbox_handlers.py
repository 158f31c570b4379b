"""Found by discovery in the processes that tests start with ``tests.concurrency.field_settings``."""

from tests.concurrency.field.acts import register

register()
