/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sends each datagram back. */
#include "xspin_handler.h"

XSPIN_PAYLOAD
{
	return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("Dual BSD/GPL");
