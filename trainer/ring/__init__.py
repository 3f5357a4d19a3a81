"""The ring as the trainer sees it (`base`), and the engines that can be one."""
