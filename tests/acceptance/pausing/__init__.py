"""An app whose handler tells a test that it has begun, and works until the test lets it go."""
