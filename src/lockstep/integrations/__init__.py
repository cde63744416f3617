"""What other trainers plug in; each part needs only its own package."""
