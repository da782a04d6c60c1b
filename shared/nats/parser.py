"""Reads what a NATS server sends, so that no byte that another client chose ends the reading.

The parser of nats-py takes vertical tabs and form feeds for spaces, which the server passes on
within subjects: messages are then lost until the client has reconnected.
"""

import json
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

LINE_END = b"\r\n"
MAX_LINE_BYTES = 1024 * 1024
"""Of a line without an end: far above the longest, a list of a cluster's servers."""
MAX_DIGITS = 18


class ServerParser(Parser):  # type: ignore[misc]
    is_dropped = False
    error: Exception | None = None
    """Ends the client's reading; the client itself does not pass it on."""

    async def parse(self, data: bytes = b"") -> None:
        self.buf.extend(data)
        try:
            await self._pass_on()
        except ProtocolError:
            raise
        except Exception as error:
            self.error = error
            raise

    async def _pass_on(self) -> None:
        while self.buf:
            if self.state == AWAITING_MSG_PAYLOAD:
                if len(self.buf) < self.needed + len(LINE_END):
                    return
                if self.is_dropped:
                    self._drop_message()
                else:
                    await self._pass_on_message()
                continue
            end = self.buf.find(LINE_END)
            if end < 0:
                if len(self.buf) > MAX_LINE_BYTES:
                    raise ProtocolError
                return
            line = bytes(self.buf[:end])
            del self.buf[: end + len(LINE_END)]
            operation, *arguments = line.split(b" ")
            if operation == b"MSG":
                self._expect_message(arguments, sizes=1)
            elif operation == b"HMSG":
                self._expect_message(arguments, sizes=2)
            else:
                await self._pass_on_line(operation, line[len(operation) :])

    async def _pass_on_line(self, operation: bytes, text: bytes) -> None:
        match operation:
            case b"PING":
                await self.nc._process_ping()  # noqa: SLF001 - as the library's parser
            case b"PONG":
                await self.nc._process_pong()  # noqa: SLF001
            case b"INFO":
                await self.nc._process_info(_decode_info(text))  # noqa: SLF001
            case b"-ERR":
                # It quotes the subject of what was refused.
                await self.nc._process_err(text.decode(errors="replace").strip().lower())  # noqa: SLF001
            case b"+OK":
                pass
            case _:
                raise ProtocolError

    def _expect_message(self, arguments: list[bytes], *, sizes: int) -> None:
        """Read `SUBJECT SID [REPLY] [HEADER SIZE] SIZE`."""
        if len(arguments) - sizes not in {2, 3}:
            raise ProtocolError
        self.msg_arg = {
            "subject": arguments[0],
            "sid": _decode_number(arguments[1]),
            "reply": arguments[2] if len(arguments) - sizes == 3 else b"",
        }
        self.needed = _decode_number(arguments[-1])
        self.header_needed = _decode_number(arguments[-2]) if sizes == 2 else 0
        if self.header_needed > self.needed:
            raise ProtocolError
        self.is_dropped = not self.nc.rates.allows(
            self.msg_arg["sid"], self.msg_arg["subject"], self.needed
        )
        self.state = AWAITING_MSG_PAYLOAD

    def _drop_message(self) -> None:
        end = self.needed + len(LINE_END)
        if self.buf[self.needed : end] != LINE_END:
            raise ProtocolError
        del self.buf[:end]
        self.state = AWAITING_CONTROL_LINE

    async def _pass_on_message(self) -> None:
        end = self.needed + len(LINE_END)
        with memoryview(self.buf) as received:  # a message may have some megabytes
            headers = bytes(received[: self.header_needed])
            data = bytes(received[self.header_needed : self.needed])
            is_complete = received[self.needed : end] == LINE_END
        if not is_complete:
            raise ProtocolError
        del self.buf[:end]
        self.state = AWAITING_CONTROL_LINE
        sent = self.msg_arg
        await self.nc._process_msg(sent["sid"], sent["subject"], sent["reply"], data, headers)  # noqa: SLF001


def _decode_number(text: bytes) -> int:
    if not text.isdigit() or len(text) > MAX_DIGITS:
        raise ProtocolError
    return int(text)


def _decode_info(text: bytes) -> dict[str, Any]:
    try:
        info = json.loads(text)
    except ValueError as error:
        raise ProtocolError from error
    if not isinstance(info, dict):
        raise ProtocolError
    return info
