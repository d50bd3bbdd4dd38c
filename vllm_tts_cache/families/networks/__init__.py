"""Networks, prompt builders and talker bases that several families share."""
