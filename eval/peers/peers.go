// SPDX-License-Identifier: Apache-2.0

// Package peers holds the sources of the programs that benchmarks compare XsPIN
// with, so that an installed binary can build them.
package peers

import _ "embed"

// XSKReceive is a bare AF_XDP receive-and-recycle loop in C.
//
//go:embed c/xsk_rx.c
var XSKReceive []byte

// UDPBatch is a UDP echo, server and client, that sends and receives in batches.
//
//go:embed c/udp_batch.c
var UDPBatch []byte
