"""The dashboard in a real browser, before a fake of the API and before the real proxy."""
