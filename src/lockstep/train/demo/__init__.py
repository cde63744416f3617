"""The demo, its terminal view and its report page."""
