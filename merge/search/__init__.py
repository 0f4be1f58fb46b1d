"""What searches for the best merge share, whoever proposes: the run, its workers, its files for people, its command."""
