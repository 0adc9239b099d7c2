// SPDX-License-Identifier: Apache-2.0

// Package packet gives handlers views of the headers in a frame, and the
// Internet checksum.
//
// A view is a []byte over the frame's own memory, so setters rewrite the
// frame in place. [Parse] finds the headers, checks every length they claim
// against the frame, and leaves out what is not wholly there: a layer that is
// not nil can be read and written without further checks. Nothing in this
// package allocates, and views need no release; they are valid as long as the
// frame is. Like any slice, a frame must not be written by one goroutine while
// another uses it.
//
// # Checksums of frames from the same machine
//
// A frame that a local socket sent over veth arrives with only the
// pseudo-header's sum in its UDP or TCP checksum field: Linux leaves the rest
// to transmit checksum offload, which veth pretends to have. Verifying such a
// field fails although the packet is good, and a field copied into a reply is
// wrong on any wire. What a handler has to do depends on what it changes:
//
//   - Swapping source and destination addresses and ports keeps a complete
//     checksum right, as the sum does not depend on the order of its words. A
//     partial one has to be completed, or set to 0, which over IPv4 means that
//     there is none. [Headers.ReplyUDP] does all of this.
//   - Changing anything else under the checksum: either compute it with
//     [Headers.UDPChecksum] or set it to 0, whatever it was before; but ask
//     [Headers.Intact] before the change, or the new one vouches for bytes that
//     the old one refutes. An incremental update ([UpdateChecksum16]) is right only for a complete
//     checksum: neither for 0 nor for a partial one.
//
// The IPv4 header checksum and ICMP checksums are always complete.
package packet
