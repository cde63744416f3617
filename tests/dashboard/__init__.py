"""The routes, logins and event stream of the dashboard, without a browser."""
