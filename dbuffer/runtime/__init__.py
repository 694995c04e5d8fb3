"""What long-lived objects need: checked options, logged trouble."""
