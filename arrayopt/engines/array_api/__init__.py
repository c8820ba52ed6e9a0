"""The engine `array_api`: rules run as written."""
