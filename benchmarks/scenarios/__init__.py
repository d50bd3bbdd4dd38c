"""One file per scenario; each exports ``run(bench) -> list[Row]``."""
