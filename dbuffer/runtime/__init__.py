"""What long-lived objects need: checked options, one caller at a time, logged trouble."""
