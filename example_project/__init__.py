"""A small Django project that uses django_outbox."""
