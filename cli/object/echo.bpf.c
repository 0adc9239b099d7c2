/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Sends each datagram to a port back, and counts them by their length. */
#include "xspin_handler.h"

const volatile __u16 port = 7; /* a parameter: the context sets it */

XSPIN_PAYLOAD
{
	struct xspin_headers h;
	__u16 to;

	xspin_headers(ctx, her, &h);
	if (!h.udp || xspin_load(ctx, h.udp + 2, &to, sizeof(to)) || to != bswap16(port))
		return xspin_to_stack(her);
	xspin_count(0, h.payload_len);
	return xspin_reply_udp(ctx, her) ? xspin_send(her) : XSPIN_DROP;
}

XSPIN_CONTEXT(PAYLOAD);
XSPIN_LICENSE("Dual BSD/GPL");
