// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"errors"
	"net/netip"
)

// A Hop is the way to a destination.
type Hop struct {
	Source    netip.Addr // our address on the way
	SourceMAC [6]byte
	MAC       [6]byte // of the destination, or of the gateway to it
	MTU       int     // of the interface
}

// ErrUnresolved says that the way to a destination is not known yet: it has been asked
// for, so try again with a later packet.
var ErrUnresolved = errors.New("address is being resolved")

// A Resolver knows neighbours and routes. Neither method waits.
type Resolver interface {
	// Resolve returns the way to an address. Its errors wrap ErrUnresolved if asking
	// again makes sense.
	Resolve(dst netip.Addr) (Hop, error)

	// From returns what of a Hop is the interface's own, Source, SourceMAC and MTU, and
	// whether src is an address of it.
	From(src netip.Addr) (hop Hop, own bool)
}
