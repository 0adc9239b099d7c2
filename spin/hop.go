// SPDX-License-Identifier: Apache-2.0

package spin

import (
	"errors"
	"net/netip"
)

// A Hop is the first hop towards a destination.
type Hop struct {
	Source    netip.Addr // our address, as the destination sees it
	SourceMAC [6]byte
	MAC       [6]byte // of the destination, or of the gateway to it
	MTU       int     // of the interface
}

// ErrUnresolved says that the hop to a destination is not known yet. It has been asked
// for, so try again with a later packet.
var ErrUnresolved = errors.New("address is being resolved")

// A Resolver knows neighbours and routes. Neither method waits.
type Resolver interface {
	// Resolve returns the hop to an address. Its errors wrap ErrUnresolved if asking
	// again makes sense.
	Resolve(dst netip.Addr) (Hop, error)

	// From returns a Hop with the fields that do not depend on a destination: Source,
	// which is src, SourceMAC and MTU. own says whether the interface has that address.
	From(src netip.Addr) (hop Hop, own bool)
}
