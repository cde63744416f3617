"""The dashboard of a gateway: its static files, and the routes behind them."""
