"""An app whose handlers do what the event's payload tells them, in whatever process they run."""
